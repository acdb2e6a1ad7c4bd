"""Refusals for want of capacity: how many there were lately, and when whoever is refused had better come back."""

from __future__ import annotations

import math
import zlib
from collections import deque

from router.policy.promise import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S

# They count as waiting requests for so long, in the measure of overload.
_COUNT_S = 2.0


class Refusals:
    """Refusals of the last moments."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque()

    def add(self, now_s: float) -> None:
        self._at_s.append(now_s)

    def lately(self, now_s: float) -> int:
        """Count those that still count."""
        while self._at_s and self._at_s[0] < now_s - _COUNT_S:
            self._at_s.popleft()
        return len(self._at_s)


def spread(retry_after_s: float, request_id: str) -> float:
    """Return the time stretched by 0 to 25 % by request id, so that a refused burst comes back spread out."""
    stretched_s = retry_after_s * (1 + zlib.crc32(request_id.encode()) / 2**34)
    if not math.isfinite(stretched_s):
        return MAX_RETRY_AFTER_S
    return min(max(stretched_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
