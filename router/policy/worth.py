"""What a pairing of a request and a replica is worth, and what it costs.

    value = quality · P(the whole promise is kept) − prices
    cost  = prefill + E[tokens that will be computed] · device-seconds a token,    in device-seconds
    rank  = (value − lost) / cost
    lost  = what those who run on the device stand to lose by its prompt (`router.signals.at_stake`), if it begins now

A request yields to them for as long as it may wait, the less the longer it has; one without any promise for no longer
than the tier's default TTFT.

P follows from the length's distribution F and the predicted times, whose errors are log-normal; their spread is
integrated at three points (Gauss-Hermite quadrature):

    P(deadline) = Σ w_z F(1 + (time left − network − z · prefill) / (z · pace))
    P(TTFT)     = Φ(ln((TTFT left − network) / prefill) / σ_ttft)
    P(TPOT)     = Φ(ln(TPOT / pace) / σ_pace)
    P(window)   = F(tokens that its context window leaves), 1 where no other candidate's leaves more

Deadline and window bound the same length, so the smaller of their chances counts; the others are multiplied. A value
that falls linearly until `late_s` after the deadline is the mean of P over the deadlines between.
"""

# ruff: noqa: PLR1730, FURB136 - done for every candidate of every decision, where each call of `max` counts
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from router.base.structs import FrozenStruct
from router.values.length import LengthCurve
from router.values.offer import Ask, Offer
from router.values.prediction import Prediction
from router.values.situation import Candidate, Situation

FLOOR: Final = 0.05
"""Below this probability a promise counts as lost."""
_LEAST_GAIN: Final = 1e-6  # of one that costs those who run there more than it is worth itself
_WORTH_BEGINNING: Final = 0.3  # of the chance that it would have now
_MOST_DOUBLINGS: Final = 8  # each priority counts twice the one below
_NODE: Final = math.sqrt(3.0)
_SQRT_2: Final = math.sqrt(2.0)
_SIDE_WEIGHT: Final = 1 / 6
_MIDDLE_WEIGHT: Final = 2 / 3
_LATE_AT: Final = (1 / 6, 1 / 2, 5 / 6)
_UNASKED_LATE: Final = 0.9  # what an answer after the tier's default TTFT is still worth
_LEAST_SIGMA: Final = 0.05
_JOINED: Final = 0.5  # of the way from the batch now to a full one, that an answer meets on average


class Worth(FrozenStruct, frozen=True):
    """One pairing, judged.

    Attributes:
        kept: probability that the whole promise is kept; with a late value, its expectation.
        value: quality · kept, less the prices.
        cost_s: device-seconds.
        lost: of those who run beside it, by its prompt, were it to begin now; in answers.
        net: the value less that, divided by `mixing_cost` where its device had better run another rung and anybody else
            is there.
    """

    candidate: Candidate
    kept: float
    value: float
    cost_s: float
    net: float
    lost: float = 0.0

    @property
    def rank(self) -> float:
        return (_gained(self.value, self.lost) if self.lost else self.value) / self.cost_s

    @property
    def kept_in_all(self) -> float:
        """By how much the chances of all on its device rise together, in answers of its quality."""
        return self.kept - self.lost / self.candidate.info.quality if self.lost else self.kept


def ask_of(situation: Situation) -> Ask:
    """Say what a newcomer asks, and what each candidate offers it."""
    objective, prediction = situation.objective, situation.candidates[0].prediction
    ttft_s = objective.ttft_s if situation.ttft_promised else None
    return Ask(
        tuple(offers_of(situation.candidates, situation)),
        objective.priority,
        situation.length,
        prediction.ttft_log_sigma,
        prediction.pace_log_sigma,
        math.inf if ttft_s is None else ttft_s,
        math.inf if objective.tpot_s is None else objective.tpot_s,
        math.inf if objective.deadline_s is None else objective.deadline_s,
        objective.late_s or 0.0,
    )


def offers_of(candidates: Sequence[Candidate], situation: Situation) -> list[Offer]:
    """Judge pairings as they would be on idle devices, each of which runs that rung alone."""
    judged = worths_of([_alone(candidate) for candidate in candidates], situation)
    return [_offer(worth, situation) for worth in judged]


def _alone(candidate: Candidate) -> Candidate:
    prediction, slope = candidate.prediction, candidate.info.prior.decode_batch_slope
    step_s = prediction.token_device_s * candidate.slots / (1.0 + slope * (candidate.slots - 1))
    idle = msgspec.structs.replace(prediction, tpot_s=step_s, wait_s=0.0, ttft_s=prediction.prefill_s)
    return msgspec.structs.replace(candidate, prediction=idle, favoured=True, at_stake=0.0)


def _offer(worth: Worth, situation: Situation) -> Offer:
    """Return the offer of a pairing that was judged on an idle device."""
    candidate, objective = worth.candidate, situation.objective
    info, prediction = candidate.info, candidate.prediction
    step_s, full_s = prediction.tpot_s, prediction.token_device_s * candidate.slots
    spent_s = situation.waited_s + prediction.network_s
    latest_s = situation.wait_left_s
    if objective.deadline_s is not None:
        tokens = situation.length.quantile(min(max(_WORTH_BEGINNING * worth.kept, 0.01), 0.99))
        work_s = prediction.prefill_s + (tokens - 1.0) * (step_s + full_s) / 2
        latest_s = min(latest_s, objective.deadline_s + (objective.late_s or 0.0) - spent_s - work_s)
    if objective.ttft_s is not None and situation.ttft_promised:
        latest_s = min(latest_s, objective.ttft_s - spent_s - prediction.prefill_s)
    doublings = min(max(objective.priority, -_MOST_DOUBLINGS), _MOST_DOUBLINGS)
    return Offer(
        replica_id=info.replica_id,
        device=info.device_key,
        family=info.family,
        slots=candidate.slots,
        local=not info.remote,
        value=max(info.quality - candidate.price, 0.0) * 2.0**doublings,
        kept=worth.kept,
        rank=worth.rank,
        cost_s=worth.cost_s,
        prefill_s=prediction.prefill_s,
        network_s=prediction.network_s,
        step_s=step_s,
        slope=info.prior.decode_batch_slope,
        latest_s=latest_s,
    )


def worth_of(candidate: Candidate, situation: Situation, *, wait_s: float = 0.0) -> Worth:
    """Judge a pairing, were it to start in `wait_s` seconds."""
    return worths_of((candidate,), situation, wait_s=wait_s)[0]


def worths_of(candidates: Sequence[Candidate], situation: Situation, *, wait_s: float | None = 0.0) -> list[Worth]:
    """Judge the pairings of a request, in that order; what they have in common is looked up once.

    Args:
        wait_s: in how many seconds it would start; None: on each candidate once a slot should be free there.
    """
    objective, length, calm = situation.objective, situation.length, situation.calm
    deadline_s, late_s, tpot_s = objective.deadline_s, objective.late_s, objective.tpot_s
    ttft_s = objective.ttft_s if situation.ttft_promised or deadline_s is None else None
    waited_s, whole_tokens, mixing_cost = situation.waited_s, length.expected(), situation.settings.mixing_cost
    longest_answer, yields = situation.longest_answer, _yields(situation)
    judged: list[Worth] = []
    for candidate in candidates:
        prediction = candidate.prediction
        prefill_s, pace_s, tokens, kept = prediction.prefill_s, expected_pace_s(candidate), whole_tokens, 1.0
        starts_s = waited_s + (prediction.wait_s if wait_s is None else wait_s)
        elapsed_s = starts_s + prediction.network_s + prediction.backlog_s
        if deadline_s is not None:
            fits = 1.0 + (deadline_s + (late_s or 0.0) - elapsed_s - prefill_s) / pace_s
            if fits < length.cap:
                tokens = length.expected(fits)
            if late_s is None:
                kept = _fits(length, deadline_s - elapsed_s, prefill_s, pace_s, prediction.pace_log_sigma)
            else:
                kept = deadline_chance(prediction, situation, elapsed_s, pace_s)
        if candidate.longest_answer < longest_answer:
            kept = min(kept, whole_chance(candidate, situation))
            tokens = min(tokens, length.expected(candidate.longest_answer))
        if ttft_s is not None:
            in_time = _phi_log(ttft_s - elapsed_s, prefill_s, prediction.ttft_log_sigma)
            kept *= in_time if situation.ttft_promised else _UNASKED_LATE + (1.0 - _UNASKED_LATE) * in_time
        if tpot_s is not None:
            kept *= _phi_log(tpot_s, pace_s, prediction.pace_log_sigma)
        value = candidate.info.quality * kept - candidate.price
        lost = candidate.at_stake * yields if wait_s is not None else 0.0
        net = _gained(value, lost) if lost else value
        cost_s = prefill_s + tokens * prediction.token_device_s
        if not (calm or candidate.favoured):
            cost_s, net = cost_s * mixing_cost, net / mixing_cost
        judged.append(Worth(candidate, kept, value, cost_s, net, lost))
    return judged


def _gained(value: float, lost: float) -> float:
    return value - lost if value - lost > _LEAST_GAIN else _LEAST_GAIN


def _yields(situation: Situation) -> float:
    """Return by how much it yields to those who run, from 1 to 0: nobody waits for others without an end."""
    objective, most_s = situation.objective, situation.settings.max_wait_ms / 1e3
    if not situation.ttft_promised and objective.tpot_s is None and objective.deadline_s is None:
        most_s = min(most_s, situation.settings.ttft_slo_ms / 1e3)
    return 1.0 - situation.waited_s / most_s if situation.waited_s < most_s else 0.0


def without_backlog(candidate: Candidate) -> Candidate:
    """Return a candidate as it would be with no other prompt before its own."""
    prediction = candidate.prediction
    start_s = prediction.wait_s + prediction.network_s + prediction.prefill_s
    ttft_s = min(prediction.ttft_s, start_s)
    return msgspec.structs.replace(candidate, prediction=msgspec.structs.replace(prediction, ttft_s=ttft_s))


def latest_starts_s(
    candidates: Iterable[Candidate], situation: Situation, short_tokens: float, long_tokens: float
) -> tuple[float, float]:
    """Seconds from now after which an answer of either length misses its promise on all candidates, were they free.

    Infinity: never. Of the `FLOOR` quantile of its length, the promise is all but lost after that.
    """
    objective = situation.objective
    deadline_s, ttft_s = objective.deadline_s, objective.ttft_s if situation.ttft_promised else None
    if deadline_s is None and ttft_s is None:
        return math.inf, math.inf
    end_s = math.inf if deadline_s is None else deadline_s + (objective.late_s or 0.0)
    first_s, waited_s = math.inf if ttft_s is None else ttft_s, situation.waited_s
    short, long = short_tokens - 1.0, long_tokens - 1.0
    latest_short_s = latest_long_s = -math.inf
    for candidate in candidates:
        prediction = candidate.prediction
        spent_s, prefill_s, tpot_s = waited_s + prediction.network_s, prediction.prefill_s, prediction.tpot_s
        left_s, first_by_s = end_s - spent_s, first_s - spent_s - 0.6 * prefill_s
        short_s, long_s = left_s - (prefill_s + short * tpot_s), left_s - (prefill_s + long * tpot_s)
        if short_s > first_by_s:
            short_s = first_by_s
        if long_s > first_by_s:
            long_s = first_by_s
        if short_s > latest_short_s:
            latest_short_s = short_s
        if long_s > latest_long_s:
            latest_long_s = long_s
    return latest_short_s, latest_long_s


def expected_pace_s(candidate: Candidate) -> float:
    """Seconds a token over the whole answer: others will join the batch, on their way to filling the device."""
    prediction = candidate.prediction
    tpot_s = prediction.tpot_s
    joined_s = (1.0 - _JOINED) * tpot_s + _JOINED * (prediction.token_device_s * candidate.slots)
    return joined_s if joined_s > tpot_s else tpot_s


def whole_chance(candidate: Candidate, situation: Situation) -> float:
    """P(its window does not cut the answer), 1 where no other candidate's window leaves more."""
    most_tokens, emitted, length = candidate.longest_answer, situation.emitted_tokens, situation.length
    if most_tokens >= situation.longest_answer:
        return 1.0
    return length.left_within(emitted, most_tokens - emitted) if emitted else length.within(most_tokens)


def deadline_chance(prediction: Prediction, situation: Situation, elapsed_s: float, pace_s: float) -> float:
    """P(the last token comes before the deadline), or the expected late value.

    Args:
        elapsed_s: accepted → its prefill begins.
    """
    objective, length = situation.objective, situation.length
    deadline_s, late_s = objective.deadline_s, objective.late_s
    if deadline_s is None:
        return 1.0
    prefill_s, sigma = prediction.prefill_s, prediction.pace_log_sigma
    if late_s is None:
        return _fits(length, deadline_s - elapsed_s, prefill_s, pace_s, sigma)
    ends_s = [deadline_s + share * late_s for share in _LATE_AT]
    return sum([_fits(length, end_s - elapsed_s, prefill_s, pace_s, sigma) for end_s in ends_s]) / len(ends_s)


def _fits(length: LengthCurve, left_s: float, prefill_s: float, pace_s: float, sigma: float) -> float:
    if left_s <= 0.0:
        return 0.0
    if sigma < _LEAST_SIGMA:
        sigma = _LEAST_SIGMA
    slower, inside = math.exp(_NODE * sigma), length.within
    slowest_tokens = 1.0 + (left_s / slower - prefill_s) / pace_s
    if slowest_tokens >= length.cap:  # the longest answer fits, even then
        return 1.0
    total = _MIDDLE_WEIGHT * inside(1.0 + (left_s - prefill_s) / pace_s) if left_s >= prefill_s else 0.0
    if left_s * slower >= prefill_s:
        total += _SIDE_WEIGHT * inside(1.0 + (left_s * slower - prefill_s) / pace_s)
    if left_s >= prefill_s * slower:
        total += _SIDE_WEIGHT * inside(slowest_tokens)
    return total


def _phi_log(limit_s: float, predicted_s: float, sigma: float) -> float:
    """P(a log-normal time with that median stays within the limit)."""
    if limit_s <= 0.0:
        return 0.0
    if predicted_s < 1e-6:
        predicted_s = 1e-6
    if sigma < _LEAST_SIGMA:
        sigma = _LEAST_SIGMA
    return 0.5 * math.erfc(-(math.log(limit_s / predicted_s) / sigma) / _SQRT_2)
