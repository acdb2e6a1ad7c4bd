"""Upper figures that are kept nine times in ten, whatever the distribution: adaptive conformal prediction.

A figure is told as (median figure) · exp(quantile). After each observation the quantile moves up when the figure was
exceeded and down when it was kept, by steps of which the expectation is 0 at the coverage wanted (Gibbs and Candès,
"Adaptive conformal inference under distribution shift", 2021; for a quantile of the score itself this is Robbins and
Monro, 1951). The share kept over n observations is within (range of the quantile) / (step · n) of the coverage,
whatever the errors do.

Errors differ with load, so there is one quantile for each band of occupancy; a band that was never seen begins where
its device stands over all of them.
"""

from __future__ import annotations

import math
from typing import Final

COVERAGE: Final = 0.9
"""Share of the upper figures that shall be kept."""
FINISH_COVERAGE: Final = 0.92
"""What is aimed at for that of finish. Answers that their deadline cut count with a belief, which is too good by some
hundredths: those that are cut are longer than others of which so much came. Measured by `benchmarks.calibration`."""
BANDS: Final = 4
"""Idle, up to two thirds full, full, and waited for."""
NORMAL_90: Final = 1.2816
"""0.9 quantile of the standard normal distribution."""
# Steps, in logs: large at first, then such that a miss is made up for by nine answers in time.
_FIRST_STEP: Final = 0.5
_STEP: Final = 0.12
_MEDIAN_STEP: Final = 0.08
_MAX_LOG: Final = math.log(30.0)


def band_of(occupied: int, slots: int, *, waits: bool) -> int:
    """Return the band of a replica whose device will have `occupied` of `slots` taken."""
    if waits:
        return 3
    return min(2, 3 * max(occupied - 1, 0) // max(slots, 1))


class RunningQuantile:
    """One quantile of log errors, tracked.

    Args:
        coverage: which quantile, in (0, 1).
        parent: where it begins.
        least: never below.
        step: of the log, once it has settled.
    """

    __slots__ = ("_coverage", "_least", "_step", "log", "seen")

    def __init__(self, coverage: float, start_log: float, *, least: float = -_MAX_LOG, step: float = _STEP) -> None:
        self._coverage = coverage
        self._least = least
        self._step = step
        self.log = start_log
        self.seen = 0

    def observe(self, error_log: float) -> None:
        """Learn from log(actual / median figure)."""
        self.kept(1.0 if error_log <= self.log else 0.0)

    def kept(self, probability: float) -> None:
        """Learn that the figure was kept with this probability: 0 or 1 where that is known.

        An answer that the deadline cut is censored: it was running at `c`. Past the figure, that is a miss. Before it,
        the figure would have been kept with P(T <= figure | T > c), the self-consistent weight (Efron, 1967).
        """
        self.seen += 1
        step, first = self._step, _FIRST_STEP * self._step / _STEP / self.seen
        if first > step:  # noqa: PLR1730 - done some four times a request, where each call of `max` counts
            step = first
        log = self.log + step * (self._coverage - probability)
        if log < self._least:
            log = self._least
        elif log > _MAX_LOG:
            log = _MAX_LOG
        self.log = log


class BandedQuantile:
    """A quantile for each band, with the quantile over all bands to begin from."""

    __slots__ = ("_arguments", "all", "bands")

    def __init__(self, coverage: float, start_log: float, *, least: float = -_MAX_LOG, step: float = _STEP) -> None:
        self._arguments = (coverage, least, step)
        self.all = RunningQuantile(coverage, start_log, least=least, step=step)
        self.bands: list[RunningQuantile | None] = [None] * BANDS

    def log(self, band: int) -> float:
        found = self.bands[band]
        return self.all.log if found is None else found.log

    def observe(self, band: int, error_log: float) -> None:
        own = self._of(band)  # before the parent moves
        self.all.observe(error_log)
        own.observe(error_log)

    def kept(self, band: int, probability: float) -> None:
        """As `RunningQuantile.kept`."""
        own = self._of(band)
        self.all.kept(probability)
        own.kept(probability)

    def _of(self, band: int) -> RunningQuantile:
        found = self.bands[band]
        if found is None:
            coverage, least, step = self._arguments
            found = self.bands[band] = RunningQuantile(coverage, self.all.log, least=least, step=step)
        return found


def median_step() -> float:
    """Return the step of a tracked median: smaller, since its errors lie on both sides."""
    return _MEDIAN_STEP


def kept_if_censored(cut_s: float, median_s: float, high_s: float) -> float:
    """Return P(T <= high | T > cut) for a log-normal T with that median and 0.9 quantile; 0 past `high_s`."""
    if cut_s >= high_s:
        return 0.0
    if cut_s <= 0 or median_s <= 0 or high_s <= median_s:
        return COVERAGE
    sigma = math.log(high_s / median_s) / NORMAL_90
    over_by_then = 0.5 * (1.0 + math.erf(math.log(cut_s / median_s) / sigma / math.sqrt(2.0)))
    return max(0.0, (COVERAGE - over_by_then) / max(1.0 - over_by_then, 1e-9))
