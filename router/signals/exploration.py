"""When a request is worth spending on finding out how an avoided replica is: rarely, and only where it may pay."""

from __future__ import annotations

import math
from typing import Final

from router.signals.learnt import Speeds

# Not within so long of the last news: with the way that beliefs age, a replica that has recovered is used within 60 s.
AFTER_S: Final = 20.0
# Nor more than one request of so many, on average.
_ONE_IN: Final = 50
# And only where it is believed slower by so much than it has been, or was said to be.
_FROM_LOG: Final = math.log(1.2)


class Exploration:
    """Counts what was sent, and what of it to explore."""

    def __init__(self) -> None:
        self._sent = 0
        self._explored = 0

    def due(self, speeds: Speeds, pessimism_log: float, now_s: float) -> bool:
        """Whether a replica that has nothing to do should be tried by the next request that has no tight promise.

        Args:
            pessimism_log: by how much, in logs, it is believed slower than it has been or was said to be.
        """
        if now_s - max(speeds.seen_s, speeds.explored_s) < AFTER_S or self._explored * _ONE_IN > self._sent + _ONE_IN:
            return False
        return pessimism_log > _FROM_LOG

    def sent(self, speeds: Speeds, now_s: float, *, explores: bool) -> None:
        """A request was sent to a replica."""
        self._sent += 1
        self._explored += explores
        speeds.explored_s = now_s
