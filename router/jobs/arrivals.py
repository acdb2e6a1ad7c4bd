"""How online traffic comes: with what gaps, how often it would find lines alone, how soon its first tokens come."""

from __future__ import annotations

import math
import statistics
from collections import deque

_RECENT = 256
_FORGET_S = 600.0  # an arrival so long ago says nothing of the next one
_SURPRISED = 0.02  # of the arrivals, those for which lines do not hold back long enough
_OFTEN, _SELDOM = 0.04, 0.03  # more of them than that are many, until they are fewer than this
_MARGIN = 1.2
_LEAST_HOLD_S = 0.25
_UNKNOWN_HOLD_S = 2.0  # while few gaps were seen
_KNOWN_GAPS = 50
_MOST_HOLD_S = 10.0


class Arrivals:
    """Told of every online request, with the time of the tier's clock.

    Attributes:
        online: requests inside the tier.
    """

    def __init__(self) -> None:
        self.online = 0
        self._left_at_s = -math.inf
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._hold_s: float | None = _UNKNOWN_HOLD_S  # None: to be found again, once somebody asks
        self._recent: deque[tuple[float, bool]] = deque(maxlen=_RECENT)  # when, and whether it was a surprise
        self._first_tokens: deque[float] = deque(maxlen=_RECENT)
        self._many = False

    def came(self, now_s: float) -> None:
        """One has come in."""
        self._recent.append((now_s, not self.online and self.hold_left_s(now_s) <= 0.0))
        gap_s = 0.0 if self.online else now_s - self._left_at_s
        if gap_s <= _MOST_HOLD_S:  # a longer one cannot be waited for
            self._gaps.append(gap_s)
            self._hold_s = None
        self.online += 1

    def left(self, now_s: float) -> None:
        """One has left."""
        self.online -= 1
        self._left_at_s = now_s

    def first_token(self, after_s: float) -> None:
        """One has its first token."""
        self._first_tokens.append(after_s)

    def hold_left_s(self, now_s: float) -> float:
        """Return for how long the next one is still to be expected, if it does not come."""
        return max(0.0, self._left_at_s + self._usual_gap_s() - now_s)

    def usual_first_token_s(self, now_s: float) -> float | None:
        """Return the median of first tokens while surprises are many; None while they are few, or nobody comes."""
        while self._recent and now_s - self._recent[0][0] > _FORGET_S:
            self._recent.popleft()
        share = sum(surprised for _, surprised in self._recent) / max(1, len(self._recent))
        self._many = share > (_SELDOM if self._many else _OFTEN)
        return statistics.median(self._first_tokens) if self._many and self._first_tokens else None

    def _usual_gap_s(self) -> float:
        """Return how long to hold back; found when it is asked for, since every online request changes it."""
        if self._hold_s is None:
            ranked = sorted(self._gaps)
            usual_s = ranked[min(len(ranked) - 1, int(len(ranked) * (1.0 - _SURPRISED)))]
            known = len(self._gaps) >= _KNOWN_GAPS
            self._hold_s = max(_MARGIN * usual_s, _LEAST_HOLD_S if known else _UNKNOWN_HOLD_S)
        return self._hold_s
