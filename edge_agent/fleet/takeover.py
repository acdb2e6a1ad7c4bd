"""Notices a second agent under this device's name, and yields to it.

The broker lets the newest connection of a client id win and, depending on the broker, tells the loser nothing. So the
loser looks at the retained `status` when it is back, before its own birth: a foreign `online` it has not seen before
means that another agent lives under this name. Then it leaves again without a word, for longer each time, and the other
one keeps the name. On its first connection an agent never yields: what it sees then is its own former life.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.fleetwire.documents import Status


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
