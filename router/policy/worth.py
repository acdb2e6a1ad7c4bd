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
from typing import Final, final

import msgspec

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


@final
class Worth:
    """One pairing, judged.

    Attributes:
        kept: probability that the whole promise is kept; with a late value, its expectation.
        kept_in_all: by how much the chances of all on its device rise together, in answers of its quality.
        value: quality · kept, less the prices.
        cost_s: device-seconds.
        lost: of those who run beside it, by its prompt, were it to begin now; in answers.
        net: the value less that, divided by `mixing_cost` where its device had better run another rung and anybody else
            is there.
        rank: value a device-second, less what is lost.
        quality, remote, variant, favoured, session, price, free: the candidate's, at hand for each comparison.
    """

    __slots__ = (
        "candidate",
        "cost_s",
        "favoured",
        "free",
        "kept",
        "kept_in_all",
        "lost",
        "net",
        "price",
        "quality",
        "rank",
        "remote",
        "session",
        "value",
        "variant",
    )

    def __init__(self, candidate: Candidate, kept: float, cost_s: float, lost: float, mixed: float) -> None:
        """Take a candidate with what was found of it.

        Args:
            cost_s: were it to run beside no other rung.
            mixed: by how much it costs more beside one, 1 where it need not be.
        """
        info = candidate.info
        self.candidate, self.kept, self.lost = candidate, kept, lost
        self.quality, self.remote, self.variant = info.quality, info.remote, info.variant
        self.favoured, self.session, self.free = candidate.favoured, candidate.session, candidate.prediction.free
        self.price = candidate.price
        self.value = gained = self.quality * kept - self.price
        self.kept_in_all, self.cost_s = kept, cost_s * mixed
        if lost:
            self.kept_in_all = kept - lost / self.quality
            gained = gained - lost if gained - lost > _LEAST_GAIN else _LEAST_GAIN
        self.net, self.rank = gained / mixed, gained / self.cost_s


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
    judge, objective, waited_s = _Judge(situation), situation.objective, situation.waited_s
    doublings = min(max(objective.priority, -_MOST_DOUBLINGS), _MOST_DOUBLINGS)
    ends_s = None if objective.deadline_s is None else objective.deadline_s + (objective.late_s or 0.0)
    first_s = objective.ttft_s if situation.ttft_promised else None
    offers = []
    for candidate in candidates:
        info, prediction, slots = candidate.info, candidate.prediction, candidate.slots
        prefill_s, network_s, slope = prediction.prefill_s, prediction.network_s, info.prior.decode_batch_slope
        full_s = prediction.token_device_s * slots
        step_s = full_s / (1.0 + slope * (slots - 1))
        spent_s = waited_s + network_s
        worth = judge.worth(candidate, spent_s, expected_pace_s(step_s, full_s), 0.0, 1.0)
        latest_s = situation.wait_left_s
        if ends_s is not None:
            tokens = situation.length.quantile(min(max(_WORTH_BEGINNING * worth.kept, 0.01), 0.99))
            work_s = prefill_s + (tokens - 1.0) * (step_s + full_s) / 2
            latest_s = min(latest_s, ends_s - spent_s - work_s)
        if first_s is not None:
            latest_s = min(latest_s, first_s - spent_s - prefill_s)
        offers.append(
            Offer(
                replica_id=info.replica_id,
                device=info.device_key,
                family=info.family,
                slots=slots,
                local=not worth.remote,
                value=max(worth.quality - worth.price, 0.0) * 2.0**doublings,
                kept=worth.kept,
                rank=worth.rank,
                cost_s=worth.cost_s,
                prefill_s=prefill_s,
                network_s=network_s,
                step_s=step_s,
                slope=slope,
                latest_s=latest_s,
            )
        )
    return offers


def worth_of(candidate: Candidate, situation: Situation, *, wait_s: float = 0.0) -> Worth:
    """Judge a pairing, were it to start in `wait_s` seconds."""
    return worths_of((candidate,), situation, wait_s=wait_s)[0]


def worths_of(candidates: Sequence[Candidate], situation: Situation, *, wait_s: float | None = 0.0) -> list[Worth]:
    """Judge the pairings of a request, in that order.

    Args:
        wait_s: in how many seconds it would start; None: on each candidate once a slot should be free there.
    """
    judge, calm, waited_s = _Judge(situation), situation.calm, situation.waited_s
    mixing_cost, yields = situation.settings.mixing_cost, _yields(situation)
    judged: list[Worth] = []
    for candidate in candidates:
        prediction = candidate.prediction
        tpot_s, network_s, queued_s = prediction.tpot_s, prediction.network_s, prediction.wait_s
        backlog_s = prediction.ttft_s - queued_s - network_s - prediction.prefill_s
        elapsed_s = waited_s + (queued_s if wait_s is None else wait_s) + network_s
        if backlog_s > 0.0:
            elapsed_s += backlog_s
        pace_s = expected_pace_s(tpot_s, prediction.token_device_s * candidate.slots)
        lost = candidate.at_stake * yields if wait_s is not None else 0.0
        mixed = 1.0 if calm or candidate.favoured else mixing_cost
        judged.append(judge.worth(candidate, elapsed_s, pace_s, lost, mixed))
    return judged


@final
class _Judge:
    """Judges the pairings of one request; what they have in common is looked up once."""

    __slots__ = (
        "_deadline_s",
        "_late_s",
        "_length",
        "_longest_answer",
        "_situation",
        "_tpot_s",
        "_ttft_promised",
        "_ttft_s",
        "_whole_tokens",
    )

    def __init__(self, situation: Situation) -> None:
        objective, self._situation = situation.objective, situation
        self._deadline_s, self._late_s, self._tpot_s = objective.deadline_s, objective.late_s, objective.tpot_s
        self._ttft_promised = situation.ttft_promised
        self._ttft_s = objective.ttft_s if self._ttft_promised or self._deadline_s is None else None
        self._length: LengthCurve = situation.length
        self._whole_tokens, self._longest_answer = self._length.expected(), situation.longest_answer

    def worth(self, candidate: Candidate, elapsed_s: float, pace_s: float, lost: float, mixed: float) -> Worth:
        """Judge one of them.

        Args:
            elapsed_s: accepted → its prefill begins.
            pace_s: seconds a token.
            lost, mixed: see `Worth`.
        """
        prediction, length, tokens, kept = candidate.prediction, self._length, self._whole_tokens, 1.0
        prefill_s, deadline_s, late_s = prediction.prefill_s, self._deadline_s, self._late_s
        if deadline_s is not None:
            fits = 1.0 + (deadline_s + (late_s or 0.0) - elapsed_s - prefill_s) / pace_s
            if fits < length.cap:
                tokens = length.expected(fits)
            if late_s is None:
                kept = _fits(length, deadline_s - elapsed_s, prefill_s, pace_s, prediction.pace_log_sigma)
            else:
                kept = deadline_chance(prediction, self._situation, elapsed_s, pace_s)
        longest_answer = candidate.longest_answer
        if longest_answer < self._longest_answer:
            kept = min(kept, whole_chance(candidate, self._situation))
            tokens = min(tokens, length.expected(longest_answer))
        ttft_s, tpot_s = self._ttft_s, self._tpot_s
        if ttft_s is not None:
            in_time = _phi_log(ttft_s - elapsed_s, prefill_s, prediction.ttft_log_sigma)
            kept *= in_time if self._ttft_promised else _UNASKED_LATE + (1.0 - _UNASKED_LATE) * in_time
        if tpot_s is not None:
            kept *= _phi_log(tpot_s, pace_s, prediction.pace_log_sigma)
        return Worth(candidate, kept, prefill_s + tokens * prediction.token_device_s, lost, mixed)


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


def expected_pace_s(tpot_s: float, full_s: float) -> float:
    """Seconds a token over the whole answer: others will join the batch, on their way to filling the device.

    Args:
        tpot_s: in the batch that it finds; full_s: in a full one.
    """
    joined_s = (1.0 - _JOINED) * tpot_s + _JOINED * full_s
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
    slower = math.exp(_NODE * sigma)
    slowest_tokens = 1.0 + (left_s / slower - prefill_s) / pace_s
    if slowest_tokens >= length.cap:  # the longest answer fits, even then
        return 1.0
    total = _MIDDLE_WEIGHT * length.within(1.0 + (left_s - prefill_s) / pace_s) if left_s >= prefill_s else 0.0
    if left_s * slower >= prefill_s:
        total += _SIDE_WEIGHT * length.within(1.0 + (left_s * slower - prefill_s) / pace_s)
    if left_s >= prefill_s * slower:
        total += _SIDE_WEIGHT * length.within(slowest_tokens)
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
