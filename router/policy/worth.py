"""What a pairing of a request and a replica is worth, and what it costs.

    value = quality · P(the whole promise is kept) − prices
    cost  = prefill + E[tokens that will be computed] · device-seconds a token,    in device-seconds
    rank  = value / cost

P follows from the length's distribution F and the predicted times, whose errors are log-normal; their spread is
integrated at three points (Gauss-Hermite quadrature):

    P(deadline) = Σ w_z F(1 + (time left − network − z · prefill) / (z · pace))
    P(TTFT)     = Φ(ln((TTFT left − network) / prefill) / σ_ttft)
    P(TPOT)     = Φ(ln(TPOT / pace) / σ_pace)

A value that falls linearly until `late_s` after the deadline is the mean of P over the deadlines between.
"""

# ruff: noqa: PLR1730, FURB136 - done for every candidate of every decision, where each call of `max` counts
from __future__ import annotations

import math

import msgspec

from router.values.length import LengthCurve
from router.values.offer import Ask, Offer
from router.values.prediction import Prediction
from router.values.situation import Candidate, Situation

FLOOR = 0.05
"""Below this probability a promise counts as lost."""
_WORTH_BEGINNING = 0.3  # of the chance that it would have now
_MOST_DOUBLINGS = 8  # each priority counts twice the one below
_NODE, _SQRT_2 = math.sqrt(3.0), math.sqrt(2.0)
_SIDE_WEIGHT, _MIDDLE_WEIGHT = 1 / 6, 2 / 3
_LATE_AT = (1 / 6, 1 / 2, 5 / 6)
_UNASKED_LATE = 0.9  # what an answer after the tier's default TTFT is still worth
_LEAST_SIGMA = 0.05
_JOINED = 0.5  # of the way from the batch now to a full one, that an answer meets on average


class Worth(msgspec.Struct, frozen=True, gc=False):
    """One pairing, judged.

    Attributes:
        kept: probability that the whole promise is kept; with a late value, its expectation.
        value: quality · kept, less the prices.
        cost_s: device-seconds.
        net: the value, divided by `mixing_cost` where its device had better run another rung and anybody else is there.
    """

    candidate: Candidate
    kept: float
    value: float
    cost_s: float
    net: float

    @property
    def rank(self) -> float:
        return self.value / self.cost_s


def ask_of(situation: Situation) -> Ask:
    """Say what a newcomer asks, and what each candidate offers it."""
    objective, prediction = situation.objective, situation.candidates[0].prediction
    ttft_s = objective.ttft_s if situation.ttft_promised else None
    return Ask(
        tuple([offer_of(candidate, situation) for candidate in situation.candidates]),
        objective.priority,
        situation.length,
        prediction.ttft_log_sigma,
        prediction.pace_log_sigma,
        math.inf if ttft_s is None else ttft_s,
        math.inf if objective.tpot_s is None else objective.tpot_s,
        math.inf if objective.deadline_s is None else objective.deadline_s,
        objective.late_s or 0.0,
    )


def offer_of(candidate: Candidate, situation: Situation) -> Offer:
    """Judge a pairing as it would be on an idle device that runs this rung alone."""
    info, prediction, objective = candidate.info, candidate.prediction, situation.objective
    full_s, slope = prediction.token_device_s * candidate.slots, info.prior.decode_batch_slope
    step_s = full_s / (1.0 + slope * (candidate.slots - 1))
    alone = msgspec.structs.replace(
        candidate,
        prediction=msgspec.structs.replace(prediction, tpot_s=step_s, wait_s=0.0, ttft_s=prediction.prefill_s),
        favoured=True,
    )
    worth = worth_of(alone, situation)
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
        slope=slope,
        latest_s=latest_s,
    )


def worth_of(candidate: Candidate, situation: Situation, *, wait_s: float = 0.0) -> Worth:
    """Judge a pairing, were it to start in `wait_s` seconds."""
    prediction, objective = candidate.prediction, situation.objective
    prefill_s, deadline_s, ttft_s = prediction.prefill_s, objective.deadline_s, objective.ttft_s
    elapsed_s = situation.waited_s + wait_s + prediction.network_s + prediction.backlog_s
    kept, fits, pace_s = 1.0, math.inf, expected_pace_s(candidate)
    if deadline_s is not None:
        left_s = deadline_s + (objective.late_s or 0.0) - elapsed_s
        fits = 1.0 + (left_s - prefill_s) / pace_s
        kept = deadline_chance(prediction, situation, elapsed_s, pace_s)
    if ttft_s is not None and (situation.ttft_promised or deadline_s is None):
        in_time = _phi_log(ttft_s - elapsed_s, prefill_s, prediction.ttft_log_sigma)
        kept *= in_time if situation.ttft_promised else _UNASKED_LATE + (1.0 - _UNASKED_LATE) * in_time
    if objective.tpot_s is not None:
        kept *= _phi_log(objective.tpot_s, pace_s, prediction.pace_log_sigma)
    cost_s = prefill_s + situation.length.expected(fits) * prediction.token_device_s
    value = candidate.info.quality * kept
    if candidate.price:
        value -= candidate.price
    if candidate.favoured or situation.calm:
        return Worth(candidate, kept, value, cost_s, value)
    mixing_cost = situation.settings.mixing_cost
    return Worth(candidate, kept, value, cost_s * mixing_cost, value / mixing_cost)


def without_backlog(candidate: Candidate) -> Candidate:
    """Return a candidate as it would be with no other prompt before its own."""
    prediction = candidate.prediction
    start_s = prediction.wait_s + prediction.network_s + prediction.prefill_s
    ttft_s = min(prediction.ttft_s, start_s)
    return msgspec.structs.replace(candidate, prediction=msgspec.structs.replace(prediction, ttft_s=ttft_s))


def latest_start_s(candidate: Candidate, situation: Situation, shortest_tokens: float) -> float:
    """Seconds from now after which the promise is all but lost on a candidate that is free then; infinity: never.

    Args:
        shortest_tokens: the `FLOOR` quantile of the answer's length.
    """
    prediction, objective = candidate.prediction, situation.objective
    spent_s = situation.waited_s + prediction.network_s
    latest_s = math.inf
    if objective.deadline_s is not None:
        work_s = prediction.prefill_s + (shortest_tokens - 1.0) * prediction.tpot_s
        latest_s = objective.deadline_s + (objective.late_s or 0.0) - spent_s - work_s
    if objective.ttft_s is not None and situation.ttft_promised:
        latest_s = min(latest_s, objective.ttft_s - spent_s - 0.6 * prediction.prefill_s)
    return latest_s


def expected_pace_s(candidate: Candidate) -> float:
    """Seconds a token over the whole answer: others will join the batch, on their way to filling the device."""
    prediction = candidate.prediction
    tpot_s = prediction.tpot_s
    joined_s = (1.0 - _JOINED) * tpot_s + _JOINED * (prediction.token_device_s * candidate.slots)
    return joined_s if joined_s > tpot_s else tpot_s


def deadline_chance(prediction: Prediction, situation: Situation, elapsed_s: float, pace_s: float) -> float:
    """P(the last token comes before the deadline), or the expected late value.

    Args:
        elapsed_s: accepted → its prefill begins.
    """
    objective, length = situation.objective, situation.length
    deadline_s, late_s = objective.deadline_s, objective.late_s
    if deadline_s is None:
        return 1.0
    sigma = prediction.pace_log_sigma
    if sigma < _LEAST_SIGMA:
        sigma = _LEAST_SIGMA
    if late_s is None:
        return _fits(length, deadline_s - elapsed_s, prediction.prefill_s, pace_s, sigma)
    ends_s = [deadline_s + share * late_s for share in _LATE_AT]
    return sum(_fits(length, end_s - elapsed_s, prediction.prefill_s, pace_s, sigma) for end_s in ends_s) / len(ends_s)


def _fits(length: LengthCurve, left_s: float, prefill_s: float, pace_s: float, sigma: float) -> float:
    if left_s <= 0.0:
        return 0.0
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
