"""What a request would cost on a replica: predicted from priors, corrected by what was observed.

The model of one replica, in seconds:

    ttft    = wait + network + a + b · (queued prefill + prompt) · (1 + slope · running)
    finish  = ttft + (answer − 1) · pace
    pace    = sum over the rungs of the device that run something of step(their batch), the newcomer in its own
    step(n) = (1 + slope · (n − 1)) / decode speed · k

Rungs of one device take turns on it and divide its slots: `SiblingLoad` tells what the others have there.

`a` (overhead) and `b` (a prompt token) are a line through the observed first tokens, fitted by least squares on
relative errors with exponential forgetting, and held by the prior while little was seen. `k` follows the observed pace
(a moving mean of log ratios, so that twice too slow and twice too fast weigh alike), and so does a factor on `wait`.
The upper figures widen each part by a running 0.9 quantile of its own log error, tracked by stochastic approximation
(Robbins and Monro, 1951): "high" is meant to be kept nine times in ten, whatever the errors' distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.values.link import LinkSnapshot
from router.values.prediction import (
    NOTHING_IN_FLIGHT,
    Demand,
    InFlightLoad,
    Prediction,
    SiblingLoad,
    TtftFeatures,
)
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior

_QUANTILE = 0.9
_QUANTILE_STEP = 0.08
_INITIAL_SPREAD_LOG = math.log(1.5)
_INITIAL_SIGMA_LOG = 0.3
_SIGMA_GAIN = 0.05
_MAX_LOG_RATIO = math.log(8.0)
_PACE_GAIN = 0.2
_WAIT_GAIN = 0.1
_FORGET = 0.92
_OUTLIER = 4.0  # one observation moves the line as if it were at most this many times off
_PRIOR_AT_TOKENS = (16.0, 1024.0)
_PRIOR_WEIGHT = 0.5
# Prior of `a`: accepting, sampling and detokenizing, on any replica.
_OVERHEAD_S = 0.005
_MIN_OVERHEAD_S = 0.0005
# Age at which a remote load figure has half of its weight; requests of this tier keep theirs.
_STALE_HALF_LIFE_S = 5.0
# Waits shorter than this are scheduling noise.
_MIN_LEARNT_WAIT_S = 0.02


@dataclass(slots=True)
class Spread:
    """A running 0.9 quantile of log(actual / predicted), never below 0."""

    log: float = _INITIAL_SPREAD_LOG

    def observe(self, ratio_log: float) -> None:
        inside = ratio_log <= self.log
        self.log = min(max(self.log + _QUANTILE_STEP * ((_QUANTILE - 1) if inside else _QUANTILE), 0.0), _MAX_LOG_RATIO)

    @property
    def factor(self) -> float:
        return math.exp(self.log)


class PrefillLine:
    """seconds = a + b · tokens, learned online."""

    def __init__(self, prior: SpeedPrior) -> None:
        self._prior_a = _OVERHEAD_S
        self._prior_b = 1.0 / prior.prefill_tokens_per_s
        self.a_s = self._prior_a
        self.b_s = self._prior_b
        self._seen = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # w, wx, wxx, wy, wxy

    def predict(self, tokens: float) -> float:
        return self.a_s + self.b_s * tokens

    def observe(self, tokens: float, seconds: float) -> None:
        expected_s = self.predict(tokens)
        y = min(max(seconds, expected_s / _OUTLIER), expected_s * _OUTLIER)
        weight = 1.0 / (expected_s * expected_s)
        new = (weight, weight * tokens, weight * tokens * tokens, weight * y, weight * tokens * y)
        self._sums = tuple(_FORGET * old + add for old, add in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        self._seen += 1
        self._fit()

    def _fit(self) -> None:
        w, wx, wxx, wy, wxy = self._sums
        trust = _PRIOR_WEIGHT * max(0.1, 1.0 / (1.0 + self._seen / 4.0))
        for x in _PRIOR_AT_TOKENS:  # weighted by today's estimate, or a prior far off would hold for ever
            weight = trust / self.predict(x) ** 2
            y = self._prior_a + self._prior_b * x
            w, wx, wxx, wy, wxy = (
                w + weight,
                wx + weight * x,
                wxx + weight * x * x,
                wy + weight * y,
                wxy + weight * x * y,
            )
        determinant = w * wxx - wx * wx
        if determinant <= 1e-12 * w * wxx:
            return
        a_s = (wy * wxx - wx * wxy) / determinant
        b_s = (w * wxy - wx * wy) / determinant
        if a_s < _MIN_OVERHEAD_S:
            a_s, b_s = _MIN_OVERHEAD_S, max(wxy - _MIN_OVERHEAD_S * wx, 0.0) / wxx
        elif b_s < self._prior_b / 50:
            b_s = self._prior_b / 50
            a_s = max((wy - b_s * wx) / w, _MIN_OVERHEAD_S)
        self.a_s, self.b_s = a_s, b_s


@dataclass(slots=True)
class _Learned:
    line: PrefillLine
    first: Spread = field(default_factory=Spread)
    pace: Spread = field(default_factory=Spread)
    first_sigma: float = _INITIAL_SIGMA_LOG
    pace_sigma: float = _INITIAL_SIGMA_LOG
    pace_log: float = 0.0
    pace_seen: int = 0


class LatencyModel:
    """Predicts for every replica, learns from every answer; one writer, the dispatcher."""

    def __init__(self, expected_answer_tokens: int) -> None:
        self.expected_answer_tokens = expected_answer_tokens
        self._learned: dict[str, _Learned] = {}
        self._answer_tokens: dict[str, float] = {}
        self._wait_log = 0.0
        self._wait = Spread()

    def answer_tokens(self, family: str, max_tokens: int | None) -> int:
        """Expected answer length: the cap, or what answers of this family have run to, whichever is lower."""
        expected = max(1, round(self._answer_tokens.get(family, float(self.expected_answer_tokens))))
        return expected if max_tokens is None else max(1, min(max_tokens, expected))

    def predict(
        self,
        snapshot: ReplicaSnapshot,
        link: LinkSnapshot | None,
        demand: Demand,
        mine: InFlightLoad = NOTHING_IN_FLIGHT,
        ahead: int = 0,
        *,
        siblings: Sequence[SiblingLoad] = (),
    ) -> Prediction:
        """Predict `demand` on the replica of `snapshot`.

        Args:
            mine: this tier's own unfinished requests there.
            ahead: requests of this tier that wait for the same replica and go first.
            siblings: the other rungs of its device that have sequences.
        """
        info = snapshot.info
        learned = self._of(info)
        own_slots = max(snapshot.slots, 1)
        slots = max(own_slots, *(s.slots for s in siblings)) if siblings else own_slots
        fresh = _fresh(snapshot)
        own = occupied_slots(snapshot, mine)
        occupied = own + sum(s.occupied for s in siblings)
        step_s = self._step_s(info, learned, min(own + 1, own_slots))
        for sibling in siblings:
            step_s += self._step_s(sibling.info, self._of(sibling.info), sibling.running)
        answer_s = demand.answer_tokens * step_s
        wait_s = wait_high_s = 0.0
        position = max(occupied + ahead - slots, own + ahead - own_slots) + 1
        if position > 0:
            left = _left_tokens(snapshot, mine, own, fresh)
            for sibling in siblings:
                left += sibling.left_tokens
            if siblings:
                left.sort()
            wait_s = _until_free_s(position, slots, left, step_s, answer_s) * math.exp(self._wait_log)
            wait_high_s = wait_s * self._wait.factor
        free = position <= 0
        if snapshot.credits is not None:  # they count what waits there, and what others send
            free = ahead < snapshot.credits
        if snapshot.credits is not None and not free:
            wait_s = max(wait_s, snapshot.credit_in_s)
            wait_high_s = max(wait_high_s, wait_s)
        tokens = self._line_tokens(
            snapshot, demand, mine, fresh, min(occupied, slots - 1) if position <= 0 else slots - 1
        )
        line_s = learned.line.predict(tokens)
        network_s = link.request_s(demand.prompt_bytes) if link else 0.0
        network_high_s = link.request_hi_s(demand.prompt_bytes) if link else 0.0
        ttft_s = wait_s + network_s + line_s
        ttft_high_s = wait_high_s + network_high_s + line_s * learned.first.factor
        rest_tokens = max(demand.answer_tokens - 1, 0)
        tpot_high_s = step_s * learned.pace.factor
        return Prediction(
            wait_s=wait_s,
            ttft_s=ttft_s,
            ttft_high_s=ttft_high_s,
            tpot_s=step_s,
            tpot_high_s=tpot_high_s,
            finish_s=ttft_s + rest_tokens * step_s,
            finish_high_s=ttft_high_s + rest_tokens * tpot_high_s,
            free=free,
            prefill_s=learned.line.predict(max(demand.prompt_tokens - demand.cached_tokens, 1)),
            network_s=network_s,
            token_device_s=self._step_s(info, learned, slots) / slots,
            ttft_log_sigma=learned.first_sigma,
            pace_log_sigma=learned.pace_sigma,
        )

    def observe_ttft(self, info: ReplicaInfo, sent: TtftFeatures, actual_s: float) -> None:
        """Learn from sent → first token, against what was predicted when it was sent."""
        actual_s -= sent.network_s
        if actual_s <= 0:
            return
        learned = self._of(info)
        ratio_log = _clip(math.log(actual_s / learned.line.predict(sent.prefill_tokens)))
        learned.first.observe(ratio_log)
        learned.first_sigma = _smoothed_sigma(learned.first_sigma, ratio_log)
        learned.line.observe(sent.prefill_tokens, actual_s)

    def observe_answer(
        self,
        info: ReplicaInfo,
        batch: int,
        tpot_s: float | None,
        tokens: int | None,
        *,
        ended: bool,
        predicted_tpot_s: float | None = None,
        siblings: Sequence[SiblingLoad] = (),
    ) -> None:
        """Learn from a finished answer.

        Args:
            batch: sequences that ran on it, itself included.
            tpot_s: its pace, None for a single token.
            tokens: its length, None if that was forced and says nothing.
            ended: it stopped by itself; one that ran into its cap only says that answers are at least so long.
            predicted_tpot_s: its pace as predicted when it was sent. The upper figure is measured against that: those
                that came after it, and made the batch larger, were not known then.
            siblings: what ran on the device's other rungs. An error is its own by its share of their steps together:
                taken as all its own, a small rung is learnt 2.2 times too slow.
        """
        if tpot_s is not None and tpot_s > 0:
            learned = self._of(info)
            others_s = sum(self._step_s(s.info, self._of(s.info), s.running) for s in siblings)
            own_s = self._step_s(info, learned, batch)
            share = own_s / (own_s + others_s)
            ratio_log = _clip(math.log(tpot_s / (own_s + others_s)))
            told_log = _clip(math.log(tpot_s / predicted_tpot_s)) if predicted_tpot_s else ratio_log
            learned.pace.observe(told_log)
            learned.pace_sigma = _smoothed_sigma(learned.pace_sigma, told_log)
            learned.pace_seen += 1
            gain = max(_PACE_GAIN, 1.0 / (learned.pace_seen + 1))
            learned.pace_log = _clip(learned.pace_log + gain * share * ratio_log)
        known = self._answer_tokens.get(info.family, float(self.expected_answer_tokens))
        if tokens is not None and (ended or tokens > known):
            self._answer_tokens[info.family] = known + 0.1 * (tokens - known)

    def wait_factor(self, info: ReplicaInfo) -> float:
        """Return the factor that was learnt for waits on that replica."""
        return math.exp(self._wait_log + self._of(info).pace_log)

    def observe_wait(self, info: ReplicaInfo, predicted_s: float, factor: float, actual_s: float) -> None:
        """Learn from a request that had to wait for a free replica.

        Args:
            info: the replica whose wait was predicted.
            factor: `wait_factor` at that time. A whole queue is predicted before the first of it is served: each moves
                the factor towards its own truth, not by its error, or their sum would overshoot; and what the pace has
                learnt meanwhile is not learnt twice.
        """
        if predicted_s < _MIN_LEARNT_WAIT_S:
            return
        ratio_log = math.log(max(actual_s, _MIN_LEARNT_WAIT_S / 2) / predicted_s)
        self._wait.observe(_clip(ratio_log))
        truth_log = ratio_log + math.log(factor) - self._of(info).pace_log
        self._wait_log = _clip(self._wait_log + _WAIT_GAIN * (_clip(truth_log) - self._wait_log))

    def sent(
        self, snapshot: ReplicaSnapshot, link: LinkSnapshot | None, demand: Demand, mine: InFlightLoad
    ) -> TtftFeatures:
        """Return what a request that is sent now finds on the replica, for `observe_ttft`."""
        running = min(
            max(snapshot.running + snapshot.queued + mine.unopened, mine.requests), max(snapshot.slots, 1) - 1
        )
        return TtftFeatures(
            prefill_tokens=self._line_tokens(snapshot, demand, mine, 1.0, running),
            network_s=link.request_s(demand.prompt_bytes) if link else 0.0,
        )

    def keep_only(self, replica_ids: set[str]) -> None:
        """Forget replicas that are gone."""
        for replica_id in self._learned.keys() - replica_ids:
            del self._learned[replica_id]

    def _line_tokens(
        self, snapshot: ReplicaSnapshot, demand: Demand, mine: InFlightLoad, fresh: float, running: int
    ) -> float:
        """Count the tokens to prefill before the first token, queued ones included, scaled by the running batch."""
        backlog = max(snapshot.queued_prefill_tokens * fresh + mine.unopened_prefill_tokens, mine.prefill_tokens)
        own = max(demand.prompt_tokens - demand.cached_tokens, 1)
        return (backlog + own) * (1.0 + snapshot.info.prior.decode_batch_slope * max(running, 0))

    def _of(self, info: ReplicaInfo) -> _Learned:
        learned = self._learned.get(info.replica_id)
        if learned is None:
            learned = self._learned[info.replica_id] = _Learned(PrefillLine(info.prior))
        return learned

    def _step_s(self, info: ReplicaInfo, learned: _Learned, batch: int) -> float:
        prior = info.prior
        growth = 1.0 + prior.decode_batch_slope * (max(batch, 1) - 1)
        return growth / prior.decode_tokens_per_s * math.exp(learned.pace_log)


def sibling_load(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> SiblingLoad:
    """Return what a replica has, as the other rungs of its device meet it."""
    occupied = occupied_slots(snapshot, mine)
    left = _left_tokens(snapshot, mine, occupied, _fresh(snapshot))
    return SiblingLoad(snapshot.info, occupied, max(snapshot.slots, 1), left)


def occupied_slots(snapshot: ReplicaSnapshot, mine: InFlightLoad) -> int:
    """Count the sequences on a replica: the larger of its report and of what this tier has sent."""
    return max(round((snapshot.running + snapshot.queued) * _fresh(snapshot)) + mine.unopened, mine.requests)


def _fresh(snapshot: ReplicaSnapshot) -> float:
    """Return the weight of a report, in (0, 1]; it halves every `_STALE_HALF_LIFE_S`."""
    return 1.0 if snapshot.age_s <= 0 else 0.5 ** (snapshot.age_s / _STALE_HALF_LIFE_S)


def _left_tokens(snapshot: ReplicaSnapshot, mine: InFlightLoad, occupied: int, fresh: float) -> list[int]:
    """Return what each sequence of a replica still generates, ascending: known for this tier's own, else spread."""
    if len(mine.left_tokens) >= occupied:
        return list(mine.left_tokens)
    pending = snapshot.pending_decode_tokens * fresh + mine.unopened_decode_tokens
    return list(_spread_evenly(pending, occupied))


def _smoothed_sigma(sigma: float, error_log: float) -> float:
    """Return a running root mean square of log errors."""
    return math.sqrt((1 - _SIGMA_GAIN) * sigma * sigma + _SIGMA_GAIN * error_log * error_log)


def _spread_evenly(pending_tokens: float, requests: int) -> Sequence[int]:
    """Remainders of requests of which only the sum is known: evenly spread over twice their mean."""
    if requests <= 0:
        return ()
    mean = pending_tokens / requests
    return [round(2.0 * mean * (index + 1) / (requests + 1)) for index in range(requests)]


def _until_free_s(position: int, slots: int, left: Sequence[int], step_s: float, answer_s: float) -> float:
    """Time until the `position`-th of the answers with `left` tokens (ascending) ends; then whole answers follow."""
    first_round = min(position, len(left))
    first_s = left[first_round - 1] * step_s if first_round else 0.0
    return first_s + max(position - len(left), 0) / slots * answer_s


def _clip(value: float) -> float:
    return min(max(value, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)
