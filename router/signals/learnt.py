"""What was learnt of one replica, and of one device: the state behind `latency.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, final

from router.signals.level import Level
from router.signals.prefill import PrefillLine
from router.signals.token_clock import TokenClock
from router.signals.upper import COVERAGE, FINISH_COVERAGE, BandedQuantile, median_step
from router.values.replica import ReplicaInfo

# How long figures stand while nothing is learnt: ageing is slower by far.
FIGURES_LAST_S: Final = 0.25
_INITIAL_HIGH_LOG: Final = math.log(1.5)
_INITIAL_PACE_HIGH_LOG: Final = math.log(1.7)  # its batch grows after it was told
_INITIAL_SIGMA: Final = 0.3
_SIGMA_GAIN: Final = 0.05
# Part of a device's pace that is left to answers while something prefills, until that was learnt: it takes turns.
_INITIAL_BESIDE_SHARE: Final = 0.5
_BESIDE_VARIANCE: Final = 0.1
_BESIDE_NOISE: Final = 0.1


def _median() -> BandedQuantile:
    return BandedQuantile(0.5, 0.0, step=median_step())


def _upper(start_log: float = _INITIAL_HIGH_LOG) -> BandedQuantile:
    return BandedQuantile(COVERAGE, start_log, least=0.0)


@final
class Figures:
    """A replica's speeds at a time.

    Attributes:
        step_s: one step of one sequence; slope: its relative growth for each further one.
        a_s, b_s: of its prefill, the level included; prefill_sigma: spread of its log errors.
    """

    __slots__ = ("a_s", "at_s", "b_s", "prefill_sigma", "slope", "step_s")

    def __init__(
        self, *, at_s: float, step_s: float, slope: float, a_s: float, b_s: float, prefill_sigma: float
    ) -> None:
        self.at_s, self.step_s, self.slope = at_s, step_s, slope
        self.a_s, self.b_s, self.prefill_sigma = a_s, b_s, prefill_sigma


@final
class Factors:
    """What is learnt of one band of a device's occupancy, as factors."""

    __slots__ = ("finish_high", "pace_bias", "pace_high", "ttft_bias", "ttft_high", "wait", "wait_high")

    def __init__(self, device: Device, band: int) -> None:
        self.pace_bias, self.pace_high = math.exp(device.pace_bias.log(band)), math.exp(device.pace_high.log(band))
        self.ttft_bias, self.ttft_high = math.exp(device.ttft_bias.log(band)), math.exp(device.ttft_high.log(band))
        self.finish_high = math.exp(device.finish_high.log(band))
        self.wait, self.wait_high = math.exp(device.wait_log), math.exp(device.wait_high.log(0))


@dataclass(slots=True)
class Speeds:
    """One replica's own speeds.

    Attributes:
        line: shape of its prefill; prefill, pace: levels on that and on the prior's steps.
        seen_s: when it last taught anything, or was told of first.
        explored_s: when a request was last sent to find out.
    """

    info: ReplicaInfo
    line: PrefillLine
    seen_s: float
    prefill: Level = field(default_factory=Level)
    pace: Level = field(default_factory=Level)
    explored_s: float = -math.inf
    _figures: Figures | None = None

    def figures(self, now_s: float) -> Figures:
        """Return the figures at `now_s`; computed again once anything was learnt, or some time has passed."""
        found = self._figures
        if found is None or now_s - found.at_s > FIGURES_LAST_S:
            prior, level = self.info.prior, math.exp(self.prefill.log(now_s))
            found = self._figures = Figures(
                at_s=now_s,
                step_s=math.exp(self.pace.log(now_s)) / prior.decode_tokens_per_s,
                slope=prior.decode_batch_slope,
                a_s=level * self.line.a_s,
                b_s=level * self.line.b_s,
                prefill_sigma=self.prefill.sigma(now_s),
            )
        return found

    def pessimism_log(self, now_s: float) -> float:
        """By how much it is believed slower than it has been or was said to be, by the figures of that time."""
        at_s = self.figures(now_s).at_s
        return max(self.prefill.pessimism(at_s), self.pace.pessimism(at_s))

    def changed(self) -> None:
        """Something was learnt."""
        self._figures = None

    def step_s(self, batch: int, now_s: float) -> float:
        """Return the seconds of one step of `batch` sequences."""
        found, prior = self._figures, self.info.prior
        if found is None or now_s - found.at_s > FIGURES_LAST_S:  # what ended is asked about, and soon teaches anew
            one_s = math.exp(self.pace.log(now_s)) / prior.decode_tokens_per_s
        else:
            one_s = found.step_s
        return one_s * (1.0 + prior.decode_batch_slope * (max(batch, 1) - 1))


@dataclass(slots=True)
class Device:
    """What is learnt of a device as a whole: what its rungs do to each other, and how far predictions miss there.

    Attributes:
        clock: tokens that its sequences should have got.
        beside_share: part of its pace that is left to answers while something prefills.
        ttft_bias, pace_bias: medians of log(actual / told); ttft_high, pace_high, finish_high: 0.9 quantiles.
        pace_sigma: root mean square of what the median leaves.
        wait_log: log factor on waits; wait_high: 0.9 quantile of what that leaves.
        version: counts what was learnt of it, and of the replicas on it.
    """

    clock: TokenClock = field(default_factory=TokenClock)
    beside_share: float = _INITIAL_BESIDE_SHARE
    beside_variance: float = _BESIDE_VARIANCE
    ttft_bias: BandedQuantile = field(default_factory=_median)
    pace_bias: BandedQuantile = field(default_factory=_median)
    ttft_high: BandedQuantile = field(default_factory=_upper)
    pace_high: BandedQuantile = field(default_factory=lambda: _upper(_INITIAL_PACE_HIGH_LOG))
    finish_high: BandedQuantile = field(default_factory=lambda: BandedQuantile(FINISH_COVERAGE, 0.0))
    pace_sigma: float = _INITIAL_SIGMA
    wait_log: float = 0.0
    wait_high: BandedQuantile = field(default_factory=_upper)
    version: int = 0
    _factors: dict[int, Factors] = field(default_factory=dict)

    def factors(self, band: int) -> Factors:
        """Return the factors of a band."""
        found = self._factors.get(band)
        if found is None:
            found = self._factors[band] = Factors(self, band)
        return found

    def changed(self) -> None:
        """Something was learnt."""
        self.version += 1
        self._factors.clear()

    def observe_pace_error(self, band: int, error_log: float) -> None:
        """Learn from log(actual / told) seconds a token, where what was told holds bias already."""
        self.pace_high.observe(band, error_log)
        left = error_log * error_log
        self.pace_sigma = math.sqrt((1 - _SIGMA_GAIN) * self.pace_sigma**2 + _SIGMA_GAIN * min(left, 1.0))

    def observe_beside(self, alone_tokens: float, beside_tokens: float, error_log: float) -> float:
        """Move the share of pace beside prefills by its part of an error; returns what that part's variance was.

        With n = alone + share · beside tokens expected, d log n / d share = beside / n.
        """
        expected = alone_tokens + self.beside_share * beside_tokens
        slope = beside_tokens / max(expected, 1e-9)
        part = slope * slope * self.beside_variance
        gain = slope * self.beside_variance / (part + _BESIDE_NOISE)
        self.beside_share = min(max(self.beside_share - gain * error_log, 0.02), 1.0)
        self.beside_variance = max(self.beside_variance * (1.0 - gain * slope), _BESIDE_VARIANCE / 20)
        return part
