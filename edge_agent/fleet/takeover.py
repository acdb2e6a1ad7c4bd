"""Notices a second agent under this device's name, and yields to it.

The broker lets the newest connection of a client id win and, depending on the broker, tells the loser nothing. So the
loser looks at the retained `status` when it is back, before its own birth: a foreign `online` it has not seen before
means that another agent lives under this name. Then it leaves again without a word, for longer each time, and the other
one keeps the name. On its first connection an agent never yields: what it sees then is its own former life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from router.fleetwire.documents import Status

log = structlog.get_logger("edge_agent.fleet")

_APART_S = 1.0


@dataclass(slots=True)
class TakeoverGuard:
    """Knowledge over all connections of one life.

    Attributes:
        session: our own, see `Status.session`.
        announced: whether this life has announced a birth before.
    """

    session: str
    announced: bool = False
    _found: Status | None = None
    _yielded_to: tuple[str, int] | None = None

    def begin(self) -> None:
        """A new connection begins: nothing is known of the status."""
        self._found = None

    def note(self, status: Status | None) -> None:
        """The retained status, as it was before our birth."""
        self._found = status

    def must_yield(self) -> bool:
        """Whether another agent was born since we last looked, and did not say goodbye."""
        found = self._found
        if not self.announced or found is None or found.session == self.session or found.reason == "goodbye":
            return False
        seen, self._yielded_to = self._yielded_to, (found.session, found.birth)
        return seen != self._yielded_to  # the same birth as last time: it never came back, the name is free


class Overwritten:
    """Says again what a device said where it was overwritten: at once, and then once a second at most.

    Two agents of one name, behind brokers that are bridged, would answer each other as fast as the network goes.
    """

    def __init__(self, announce: Callable[[], None], told: str = "a stale status was overwritten") -> None:
        """Create it anywhere, use it on the event loop.

        Args:
            announce: publishes what holds.
            told: what the log says then.
        """
        self._announce = announce
        self._told = told
        self._pause: asyncio.TimerHandle | None = None
        self._again = False
        self._times = 0

    def note(self, found: Status | None = None) -> None:
        """Take what is not the last word of this agent: a status, or None for what is none."""
        self._times += 1
        if self._times & (self._times - 1) == 0:  # the first, second, fourth, …: a flood fills no log
            log.warning(self._told, birth=found.birth if found else None, times=self._times)
        if self._pause is None:
            self._speak()
        else:
            self._again = True

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _speak(self) -> None:
        self._again = False
        self._pause = asyncio.get_running_loop().call_later(_APART_S, self._rested)
        self._announce()

    def _rested(self) -> None:
        self._pause = None
        if self._again:
            self._speak()
