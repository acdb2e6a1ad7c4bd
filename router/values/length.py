"""How long an answer may become: the survival of its length, over logarithmic bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

RATIO: Final = 1.1
"""Ratio between the edges of two neighbouring bins."""
BINS: Final = 112
"""Edges at 1.1^0 … 1.1^111: 1 to 39,400 tokens. What is longer falls into the last bin."""
EDGES: Final = tuple(RATIO**k for k in range(BINS))

_PER_LOG: Final = 1.0 / math.log(RATIO)
_LAST: Final = BINS - 1


def position_of(tokens: float) -> float:
    """Return where a length lies between the edges: 0 at one token, 1 at 1.1 tokens."""
    return math.log(tokens) * _PER_LOG if tokens > 1.0 else 0.0


@final
class LengthCurve:
    """Distribution of what is left to generate, in tokens.

    Attributes:
        survival: P(length > 1.1^k) for k = 0 … 111, not increasing.
        area: ∫ of the survival from 0 to 1.1^k: the tokens expected of an answer that is ended there.
        cap: no answer is longer; infinity where nothing bounds it.
    """

    __slots__ = ("area", "cap", "survival")

    def __init__(self, survival: Sequence[float], area: Sequence[float], cap: float = math.inf) -> None:
        self.survival = survival
        self.area = area
        self.cap = cap

    @classmethod
    def of(cls, survival: Sequence[float], cap: float = math.inf) -> LengthCurve:
        """Return the curve with that survival at the edges."""
        area = [1.0]
        total = 1.0
        for k in range(1, BINS):
            total += 0.5 * (survival[k - 1] + survival[k]) * (EDGES[k] - EDGES[k - 1])
            area.append(total)
        return cls(survival, area, cap)

    @classmethod
    def exactly(cls, tokens: int) -> LengthCurve:
        """Return the curve of an answer whose length is known."""
        return cls([1.0] * BINS, EDGES, float(max(tokens, 1)))

    def within(self, tokens: float) -> float:
        """P(length ≤ tokens)."""
        if tokens >= self.cap:
            return 1.0
        if tokens < 1.0:
            return 0.0
        x = math.log(tokens) * _PER_LOG
        k = int(x)
        if k >= _LAST:
            return 1.0 - self.survival[_LAST]
        low = self.survival[k]
        return 1.0 - low - (x - k) * (self.survival[k + 1] - low)

    def expected(self, tokens: float = math.inf) -> float:
        """E[min(length, tokens)], at least 1."""
        if tokens > self.cap:  # noqa: PLR1730 - done for every candidate of every decision
            tokens = self.cap
        if tokens <= 1.0:
            return 1.0
        if tokens >= EDGES[_LAST]:
            return self.area[_LAST]
        k = int(math.log(tokens) * _PER_LOG)
        return self.area[k] + (tokens - EDGES[k]) * self.survival[k]

    def expected_left(self, emitted: float, tokens: float = math.inf) -> float:
        """E[min(length − emitted, tokens) | length > emitted], at least 1."""
        if emitted < 1.0:
            return self.expected(tokens)
        more = self.expected(emitted + tokens) - self.expected(emitted)
        return max(1.0, more / max(1.0 - self.within(emitted), 1e-3))

    def quantile(self, share: float) -> float:
        """Smallest length that so large a share of answers does not exceed."""
        if self.cap <= 1.0:
            return 1.0
        left = 1.0 - share
        low, high = 0, _LAST
        if self.survival[low] <= left:
            return 1.0
        while high - low > 1:
            middle = (low + high) // 2
            if self.survival[middle] > left:
                low = middle
            else:
                high = middle
        drop = self.survival[low] - self.survival[high]
        part = (self.survival[low] - left) / drop if drop > 0 else 1.0
        return float(min(EDGES[low] * RATIO ** min(part, 1.0), self.cap))

    def left_within(self, emitted: float, tokens: float) -> float:
        """P(at most `tokens` more | more than `emitted` came), for an answer of which `emitted` tokens are out."""
        out = self.within(emitted)
        return 1.0 if out >= 1.0 else (self.within(emitted + tokens) - out) / (1.0 - out)
