"""So many a minute: a bucket that fills steadily, and holds one minute's worth at most."""

from __future__ import annotations

_MINUTE_S = 60.0


class Bucket:
    """Starts full. What is taken may bring it below zero: then it has to fill up first.

    Args:
        limit: a minute.
    """

    __slots__ = ("_at_s", "_left", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at_s = now_s

    def left(self, now_s: float) -> float:
        """What can be taken now; below zero where more was taken than there was."""
        if now_s > self._at_s:
            self._left = min(self.limit, self._left + (now_s - self._at_s) * self.limit / _MINUTE_S)
            self._at_s = now_s
        return self._left

    def take(self, now_s: float, amount: float) -> None:
        """Take from it; a negative amount gives back what was taken in vain."""
        self._left = min(self.limit, self.left(now_s) - amount)

    def wait_s(self, now_s: float, amount: float) -> float:
        """Seconds until so much can be taken; 0 where it can be now."""
        return max(0.0, (min(amount, self.limit) - self.left(now_s)) * _MINUTE_S / self.limit)

    def resize(self, now_s: float, limit: int) -> None:
        """Change the limit; what was taken lately stays taken."""
        taken = self.limit - self.left(now_s)
        self.limit = limit
        self._left = limit - taken
