"""An asyncio event loop whose time is virtual: it jumps to the next timer once nothing is left to run.

Everything built on asyncio runs on it as it is, in the same order every time: nothing depends on the machine's clock.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Mapping
from typing import Any

from router.base.errors import OverspillError


class NothingLeft(OverspillError):
    """Everything waits, and nothing will ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The selector event loop of asyncio over a selector that never sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jump(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self.now_s


class LoopClock:
    """`router.base.clock.Clock` over the time of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now_s = loop.time
        self._loop = loop

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)

    def call_at(self, due_s: float, ring: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(due_s, ring)


class _Jump(selectors.SelectSelector):
    """Advances its loop's time by the timeout instead of waiting. No file becomes ready in a simulation."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("the simulation hangs: every task waits, and no timer is set")
        if timeout > 0:
            # A timer that the sum falls short of by its last bit would find the clock before its own time.
            self._loop.now_s = math.nextafter(self._loop.now_s + timeout, math.inf)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map()
