"""Whether a candidate keeps the promise, what a choice is called, and what is left when none keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.policy.worth import FLOOR, deadline_chance, whole_chance
from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation

MIN_RETRY_AFTER_S: Final = 0.25
MAX_RETRY_AFTER_S: Final = 120.0
# A request is given up early only when the wait is predicted to be clearly too long: predictions err.
_HOPELESS_WAIT: Final = 1.5
# Interval in which those that wait by a prediction are decided again, since it ages: all of them, and each of many.
_LOOK_AGAIN_S: Final = 1.0
_LOOK_AGAIN_EACH_S: Final = 0.02
_UNFORCED = {"device-first", "best-quality"}


def keeps(candidate: Candidate, situation: Situation) -> bool:
    """Whether the upper predictions of TTFT, TPOT and finish lie inside the objective, for an answer as expected.

    Its context window has to hold that answer, too.
    """
    prediction, objective = candidate.prediction, situation.objective
    if candidate.longest_answer < situation.emitted_tokens + wanted_tokens(situation):
        return False
    if objective.ttft_s is not None and situation.waited_s + prediction.ttft_high_s > objective.ttft_s:
        return False
    if objective.tpot_s is not None and prediction.tpot_high_s > objective.tpot_s:
        return False
    if objective.deadline_s is None:
        return True
    return situation.waited_s + prediction.finish_high_with(wanted_tokens(situation)) <= objective.deadline_s


def wanted_tokens(situation: Situation) -> int:
    """Expected length of what is left to generate, under the overload's cap."""
    if situation.answer_cap is None:
        return situation.answer_tokens
    return max(1, min(situation.answer_tokens, situation.answer_cap - situation.emitted_tokens))


def is_smaller(candidate: Candidate, situation: Situation) -> bool:
    """Whether a candidate is a step down from the best rung, rather than its near equal."""
    return situation.best_quality - candidate.info.quality > situation.settings.device_first_quality_slack + 1e-9


def choose(
    candidate: Candidate,
    situation: Situation,
    reason: str,
    *,
    rank: float | None = None,
    waits_for: Mapping[str, float] | None = None,
    good_for_s: float | None = None,
    kept: float | None = None,
    not_now: bool = False,
) -> Choice:
    """Send to `candidate`, or wait for it, under the overload's answer cap if there is one, and say what it gives up.

    Args:
        rank: None for `slack_rank`.
        waits_for: None for the candidate alone.
        kept, not_now: see `Choice`.
        good_for_s: None for a second, more where many wait.
    """
    overload = situation.answer_cap
    bites = overload is not None and not (
        situation.open_ended and situation.answer_tokens + situation.emitted_tokens <= overload
    )
    cut = _least(overload if bites else None, candidate.window_cap)
    smaller = is_smaller(candidate, situation) and not situation.pinned
    if smaller:
        reason = "upstream-down" if situation.remote_down and not situation.overloaded else "step-down"
    elif cut is not None:
        reason = "shorter-answer"
    if rank is None:
        rank = slack_rank(candidate, situation)
    if waits_for is None:
        waits_for = {candidate.info.replica_id: rank}
    if good_for_s is None:
        good_for_s = look_again_s(situation)
    return Choice(
        candidate,
        reason,
        degraded=smaller or cut is not None,
        max_tokens=_least(cut, overload),
        rank=rank,
        waits_for=waits_for,
        good_for_s=good_for_s,
        kept=kept,
        not_now=not_now,
    )


def look_again_s(situation: Situation) -> float:
    """In how long one that waits by a prediction, or for room of which nobody tells, is decided again."""
    return max(_LOOK_AGAIN_S, situation.waiting * _LOOK_AGAIN_EACH_S)


def slack_rank(candidate: Candidate, situation: Situation) -> float:
    """Rank by slack: whoever has to begin first goes first. Of a TTFT's promise only the prefill is work."""
    prediction, objective = candidate.prediction, situation.objective
    begins_s = situation.settings.ttft_slo_ms / 1e3 - prediction.prefill_s
    if objective.ttft_s is not None:
        begins_s = objective.ttft_s - prediction.prefill_s
    if objective.deadline_s is not None:
        work_s = prediction.prefill_s + max(situation.answer_tokens - 1, 0) * prediction.tpot_s
        begins_s = min(begins_s, objective.deadline_s - work_s)
    return -(situation.now_s - situation.waited_s + begins_s)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def reason_for(candidate: Candidate, situation: Situation) -> str:
    """Name why an undegraded choice fell on this replica."""
    locality = situation.objective.locality.value
    if situation.pinned or locality != "any":
        return "pinned" if situation.pinned else locality
    if not candidate.info.remote:
        return "device-first" if situation.remote_served else "best-quality"
    return "context" if situation.only_remote_fits else _reason_for_remote(situation)


def _reason_for_remote(situation: Situation) -> str:
    local = [c for c in situation.candidates if not c.info.remote and not is_smaller(c, situation)]
    if any(not c.prediction.free for c in local):
        return "overflow"
    if local:
        return "objective"
    return "device-down" if situation.local_down else "best-quality"


def late_or_hopeless(situation: Situation) -> Choice | Hopeless:
    """When nothing keeps the promise: serve late where that is still of use, else say when to come back.

    Late is of use when only a TTFT or TPOT is missed, and either nobody asked for it, or a replica is idle: then
    waiting would not help, and refusing would never show whether the prediction was right. A request of negative
    priority is not served late by a busy tier. A deadline is hard: it is lost when even on an idle replica the whole
    answer is all but certain to miss it.

    Being late is no reason to give up quality that nobody agreed to give up; overload is.
    """
    slack = 1.0 if situation.overloaded else situation.settings.device_first_quality_slack
    best = max(c.info.quality for c in situation.candidates) - slack - 1e-9
    equals = [c for c in situation.candidates if c.info.quality >= best]
    soonest = min(equals, key=lambda c: (c.prediction.ttft_s, -c.info.quality))
    idle = soonest.prediction.free
    feasible = [c for c in equals if _chance(c, situation, c.prediction.wait_s) > FLOOR]
    patient = not situation.ttft_promised and situation.objective.priority >= 0
    too_long = soonest.prediction.wait_s > _HOPELESS_WAIT * situation.wait_left_s
    if feasible and (idle or (patient and not too_long)):
        candidate = min(feasible, key=lambda c: (c.prediction.ttft_s, -c.info.quality))
        reason = reason_for(candidate, situation)
        return choose(candidate, situation, "late" if reason in _UNFORCED else reason)
    return Hopeless(
        why=f"the soonest first token is expected in {soonest.prediction.ttft_high_s * 1e3:.0f} ms, "
        f"after {situation.waited_s * 1e3:.0f} ms of waiting; to be kept: {to_keep(situation)}",
        retry_after_s=backlog_s(situation),
        deadline_lost=all(_chance(c, situation, 0.0) <= FLOOR for c in situation.candidates),
    )


def _chance(candidate: Candidate, situation: Situation, wait_s: float) -> float:
    """P(the answer is whole before its deadline, if it has one), were the request to begin in `wait_s` seconds."""
    elapsed_s = situation.waited_s + wait_s + candidate.prediction.network_s
    in_time = deadline_chance(candidate.prediction, situation, elapsed_s, candidate.prediction.tpot_s)
    return min(in_time, whole_chance(candidate, situation))


def backlog_s(situation: Situation) -> float:
    """When a request like this one should find room, were it sent again then.

    A replica that is free and still does not serve it would not serve it later either: those that are busy count.
    """
    busy = [c.prediction.wait_s for c in situation.candidates if not c.prediction.free]
    return min(max(min(busy, default=0.0), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def to_keep(situation: Situation) -> str:
    objective = situation.objective
    ttft = "TTFT" if situation.ttft_promised else "this tier's default TTFT"
    limits = {ttft: objective.ttft_s, "TPOT": objective.tpot_s, "deadline": objective.deadline_s}
    return ", ".join(f"{name} {value_s * 1e3:.0f} ms" for name, value_s in limits.items() if value_s is not None) or (
        f"a free replica within {situation.wait_left_s:.1f} s"
    )
