"""Tests that may be looked at after every observation: wealth of bets against "it is no worse".

While that holds, each bet is fair or worse, so the wealth is a non-negative supermartingale that begins at 1, and

    P(it ever reaches 1 / α) ≤ α        (Ville, 1939; as tests: Shafer, "Testing by betting", JRSS A 184, 2021)

whenever one stops looking. What to bet is not known, so the wealth is divided among several stakes at the beginning and
their mean is what counts (the method of mixtures; Robbins, 1970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_STAKES = (0.2, 0.5, 0.8, 0.95)
_RATIOS = (2.0, 4.0, 16.0, 64.0, 512.0)


class _Wealth:
    """Of several bettors who began with 1 each."""

    def __init__(self, bettors: int) -> None:
        self._logs = [0.0] * bettors
        self.most = 1.0

    @property
    def now(self) -> float:
        """Their mean."""
        return sum([math.exp(min(log, 700.0)) for log in self._logs]) / len(self._logs)

    def multiply(self, factors: Sequence[float]) -> None:
        self._logs = [log + math.log(factor) for log, factor in zip(self._logs, factors, strict=True)]
        self.most = max(self.most, self.now)


class FailureTest:
    """Whether units of one side fail more often than those of the other; both are drawn from the same stream.

    Each unit is on the first side with probability w, whatever it holds. If it fails there no more often, a unit of
    which only is known that it failed is on the first side with probability w at most. A bettor who believes that
    failures are r times as frequent there multiplies its wealth at each failure

        by r / (r·w + 1 − w) on the first side,     by 1 / (r·w + 1 − w) on the other.

    It needs no count of successes, and no rate of failure that is normal; w may change over time.
    """

    def __init__(self) -> None:
        self._wealth = _Wealth(len(_RATIOS))

    @property
    def evidence(self) -> float:
        """The largest wealth so far."""
        return self._wealth.most

    def failed(self, *, first: bool, share: float) -> None:
        """A unit failed.

        Args:
            first: it was on the first side.
            share: w, the probability with which it came to be there, in (0, 1).
        """
        self._wealth.multiply([(r if first else 1.0) / (r * share + 1.0 - share) for r in _RATIOS])


class SignTest:
    """Whether a coin shows heads more often than not. A stake λ wins a share λ of the wealth by heads, or loses it.

    Heads stands for: worse than a fair comparison. If a figure of one side is exchangeable with an odd number of
    figures of the other one, it is above their median with probability 1/2, whatever the figures' distribution.
    """

    def __init__(self) -> None:
        self._wealth = _Wealth(len(_STAKES))
        self.heads = 0
        self.tails = 0

    @property
    def evidence(self) -> float:
        """The largest wealth so far."""
        return self._wealth.most

    def shows(self, *, heads: bool) -> None:
        self.heads += heads
        self.tails += not heads
        self._wealth.multiply([1.0 + stake if heads else 1.0 - stake for stake in _STAKES])
