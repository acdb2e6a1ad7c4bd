"""How many sequences does a server run at once that does not say so? Seen from what runs and what waits there."""

from __future__ import annotations

_ASSUMED = 64
_MORE = 1.25


class SeenSlots:
    """Starts high. What waits at two polls in a row shows that no more run; while nothing waits, more are tried.

    What waits at one poll only may wait for the next step of the engine, and for no slot.
    """

    def __init__(self) -> None:
        self.slots = _ASSUMED
        self._waited = self._was_full = False

    def of(self, declared: int) -> int:
        """Return how many of so many declared ones there are: fewer, once less ran while others waited."""
        return min(declared, self.slots) if self._was_full else declared

    def saw(self, running: int | None, waiting: int | None) -> None:
        """Take in what a server says at a poll; None where it says nothing."""
        if running is None:
            return
        waits = bool(waiting) and running > 0
        if waits and self._waited:
            self.slots, self._was_full = running, True
        elif not waits and running >= self.slots:
            self.slots = max(running, int(self.slots * _MORE) + 1)
        self._waited = waits
