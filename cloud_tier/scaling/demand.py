"""What is asked of a model, learnt from requests as they come and go: how many, how long, how unevenly, how soon.

Rates are exponentially weighted at two speeds; a rise that is more than chance is continued towards the time at which a
new replica would serve (Brown, 1959), damped, since few go on for long (Gardner and McKenzie, 1985). Seconds in a slot
follow Little's law, S = ∫ running dt / answers ended: answers that still run count for what they took so far, as in a
total time on test (Epstein and Sobel, 1953).
"""

from __future__ import annotations

import math
from collections import deque

_QUICK_S, _SLOW_S = 10.0, 45.0
_SERVICE_S = 300.0
_GUESS_COUNTS = 16.0  # answers that the guess of their length counts as
_BIN_S = 5.0
_BINS_S = 300.0
_LEAST_SEEN = 0.6  # of a window, taken as seen from the start: the first seconds tell little
_BY_CHANCE = 2.0  # standard deviations that a rise may be by chance,
_FEW = 3.0  # and requests beside them: so few tell nothing
_DAMPING_S = 15.0  # a rise is continued as if for so long at most
_MOST_GROWTH = 1.5  # a forecast never goes beyond so many times what is seen
_MOST_VARIABILITY = 6.0
_PROMISES_KEPT = 512
_TIGHT_SHARE = 0.2  # of the promises, those that set the budget


class Demand:
    """Feed it `came` and `went`, and `look` now and then.

    Args:
        service_s: guess of an answer's seconds in a slot before any ended.
    """

    def __init__(self, now_s: float, service_s: float) -> None:
        self._began_s = self._at_s = now_s
        self._new = 0
        self._quick = self._slow = 0.0  # not corrected for the time that they have seen
        self._ended = _GUESS_COUNTS
        self._running_s = self._batch_s = _GUESS_COUNTS * service_s  # the latter is ∫ batch of a replica · running dt
        self._bins = _Bins(now_s)
        self._lengths = _Spread()
        self._budgets: deque[tuple[float | None, float | None]] = deque(maxlen=_PROMISES_KEPT)
        self._first_s = 0.0
        self.last_came_s: float | None = None

    def came(self, now_s: float, ttft_s: float | None, deadline_s: float | None) -> None:
        """A request came in, with what it was promised."""
        self._new += 1
        self._bins.add(now_s)
        self.last_came_s = now_s
        self._budgets.append((ttft_s, deadline_s))

    def was_invalid(self) -> None:
        """A request that came asked for what nobody serves: it was none."""
        self._new -= 1

    def ended(self, held_s: float, first_s: float | None) -> None:
        """An answer left its slot after `held_s`; its first token came `first_s` after it was given the slot."""
        self._ended += 1.0
        self._lengths.add(held_s)
        if first_s is not None:
            self._first_s += 0.1 * (first_s - self._first_s)

    def look(self, now_s: float, running: int, batch: float) -> None:
        """Bring the estimates up to a moment.

        Args:
            running: answers in slots since the last look.
            batch: of them, how many a replica has.
        """
        passed_s = now_s - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s = now_s
        rate = max(0, self._new) / passed_s
        self._new = 0
        for name, window_s in (("_quick", _QUICK_S), ("_slow", _SLOW_S)):
            kept = math.exp(-passed_s / window_s)
            setattr(self, name, getattr(self, name) * kept + rate * (1.0 - kept))
        if running:
            kept = math.exp(-passed_s / _SERVICE_S)
            self._ended *= kept
            self._running_s = self._running_s * kept + running * passed_s
            self._batch_s = self._batch_s * kept + batch * running * passed_s

    def _seen(self, window_s: float) -> float:
        """Return the weight that a window has seen of the past, to correct for what came before the first look."""
        return 1.0 - math.exp(-max((self._at_s - self._began_s) / window_s, _LEAST_SEEN))

    @property
    def arrivals_per_s(self) -> float:
        """Requests a second, over the last minute or so."""
        return self._slow / self._seen(_SLOW_S)

    def forecast_per_s(self, ahead_s: float) -> float:
        """Return requests a second `ahead_s` from now: what is seen, and a rise that is more than chance, continued."""
        quick, slow = self._quick / self._seen(_QUICK_S), self.arrivals_per_s
        more = (self._quick - slow) * _QUICK_S  # requests than usual, in the quick window
        if more <= _BY_CHANCE * math.sqrt(slow * _QUICK_S * self.burstiness / 2.0) + _FEW:
            return slow
        slope = (quick - slow) / (_SLOW_S - _QUICK_S)
        goes_on_s = _QUICK_S + _DAMPING_S * (1.0 - math.exp(-ahead_s / _DAMPING_S))
        return min(quick + slope * goes_on_s, _MOST_GROWTH * quick)

    @property
    def service_s(self) -> float:
        """Seconds that an answer holds its slot, at `batch`."""
        return self._running_s / self._ended

    @property
    def batch(self) -> float:
        """Mean number of answers beside each other on a replica, as answers see it."""
        return self._batch_s / self._running_s if self._running_s else 1.0

    @property
    def burstiness(self) -> float:
        """Variance of counts of arrivals over their mean; 1 for Poisson's, which is the least that is assumed."""
        return self._bins.dispersion

    @property
    def variability(self) -> float:
        """(c_a² + c_s²) / 2 of the formulas."""
        return min((self.burstiness + self._lengths.squared_variation) / 2.0, _MOST_VARIABILITY)

    def budget_s(self, default_ttft_s: float) -> float:
        """Return what the tighter promises leave for waiting, in seconds.

        Args:
            default_ttft_s: the promise of requests that named none.
        """
        left = sorted(self._left_s(ttft_s, deadline_s, default_ttft_s) for ttft_s, deadline_s in self._budgets)
        if not left:
            left = [default_ttft_s - self._first_s]
        return max(0.0, left[int(_TIGHT_SHARE * (len(left) - 1))])

    def _left_s(self, ttft_s: float | None, deadline_s: float | None, default_ttft_s: float) -> float:
        budgets = []
        if deadline_s is not None:
            budgets.append(deadline_s - self.service_s)
        if ttft_s is not None or deadline_s is None:
            budgets.append((default_ttft_s if ttft_s is None else ttft_s) - self._first_s)
        return min(budgets)


class _Bins:
    """Counts of arrivals in bins of a few seconds: their index of dispersion, variance over mean.

    The variance is half the mean square of successive differences (von Neumann, 1941): a change of the rate itself
    hardly counts in it.
    """

    def __init__(self, now_s: float) -> None:
        self._bin = int(now_s // _BIN_S)
        self._count = self._before = 0
        self._mean = self._square = self._weight = 0.0

    def add(self, now_s: float) -> None:
        current = int(now_s // _BIN_S)
        while self._bin < current and self._weight > 0.0 and current - self._bin < _BINS_S / _BIN_S:
            self._close()
        if self._bin < current:
            self._close()
            self._bin = current
        self._count += 1

    def _close(self) -> None:
        kept = math.exp(-_BIN_S / _BINS_S)
        self._mean = self._mean * kept + self._count
        self._square = self._square * kept + (self._count - self._before) ** 2 / 2.0
        self._weight = self._weight * kept + 1.0
        self._before, self._count = self._count, 0
        self._bin += 1

    @property
    def dispersion(self) -> float:
        if self._weight < 2.0 or self._mean <= 0.0:
            return 1.0
        return max(1.0, self._square / self._mean)


class _Spread:
    """The squared coefficient of variation of answers' seconds in a slot; 1 (exponential) before some were seen."""

    def __init__(self) -> None:
        self._weight = self._mean = self._square = 0.0

    def add(self, value: float) -> None:
        kept = 0.98
        self._weight = self._weight * kept + 1.0
        self._mean = self._mean * kept + value
        self._square = self._square * kept + value * value

    @property
    def squared_variation(self) -> float:
        if self._weight < 10.0 or self._mean <= 0.0:
            return 1.0
        mean = self._mean / self._weight
        return max(0.0, self._square / self._weight / mean**2 - 1.0)
