"""Whether a candidate keeps the promise, what a choice is called, and what is left when none keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from router.values.choice import Choice, Hopeless
from router.values.situation import Candidate, Situation

MIN_RETRY_AFTER_S = 0.25
MAX_RETRY_AFTER_S = 120.0
# A request is given up early only when the wait is predicted to be clearly too long: predictions err.
_HOPELESS_WAIT = 1.5
_UNFORCED = {"device-first", "best-quality"}


def keeps(candidate: Candidate, situation: Situation, answer_tokens: int | None = None) -> bool:
    """Whether the upper predictions of TTFT, TPOT and finish lie inside the objective.

    Args:
        answer_tokens: length of what is left to generate; None takes the expected one, under the overload's cap.
    """
    prediction, objective = candidate.prediction, situation.objective
    if objective.ttft_s is not None and situation.waited_s + prediction.ttft_high_s > objective.ttft_s:
        return False
    if objective.tpot_s is not None and prediction.tpot_high_s > objective.tpot_s:
        return False
    if objective.deadline_s is None:
        return True
    tokens = wanted_tokens(situation) if answer_tokens is None else answer_tokens
    return situation.waited_s + prediction.finish_high_with(tokens) <= objective.deadline_s


def wanted_tokens(situation: Situation) -> int:
    """Expected length of what is left to generate, under the overload's cap."""
    if situation.answer_cap is None:
        return situation.answer_tokens
    return max(1, min(situation.answer_tokens, situation.answer_cap - situation.emitted_tokens))


def shortest_of_use(situation: Situation) -> int:
    """Length below which an answer is not shortened."""
    return min(situation.settings.min_answer_tokens, situation.answer_tokens)


def is_smaller(candidate: Candidate, situation: Situation) -> bool:
    """Whether a candidate is a step down from the best rung, rather than its near equal."""
    return situation.best_quality - candidate.info.quality > situation.settings.device_first_quality_slack + 1e-9


def longest_answer(candidate: Candidate, situation: Situation) -> int:
    """Most tokens the candidate can still generate before the deadline, 0 if it cannot begin in time."""
    if situation.objective.deadline_s is None:
        return situation.answer_tokens
    prediction = candidate.prediction
    left_s = situation.objective.deadline_s - situation.waited_s - prediction.ttft_high_s
    return 0 if left_s < 0 else 1 + int(left_s / prediction.tpot_high_s)


def choose(candidate: Candidate, situation: Situation, reason: str, max_tokens: int | None = None) -> Choice:
    """Send to `candidate`, under the overload's answer cap if there is one, and say what that gives up.

    Args:
        max_tokens: cap on what is left to generate, below what is expected.
    """
    emitted = situation.emitted_tokens
    whole = None if max_tokens is None else max_tokens + emitted
    overload = situation.answer_cap
    bites = overload is not None and not (situation.open_ended and situation.answer_tokens + emitted <= overload)
    cut = _least(whole, overload if bites else None, candidate.window_cap)
    bound = _bound(candidate, situation)
    cap = _least(cut, overload, None if bound is None else bound + emitted)
    smaller = is_smaller(candidate, situation)
    if situation.pinned:
        smaller = False
    if smaller:
        reason = "upstream-down" if situation.remote_down and not situation.overloaded else "step-down"
    elif cut is not None:
        reason = "shorter-answer"
    return Choice(candidate, reason, degraded=smaller or cut is not None, max_tokens=cap)


def _least(*caps: int | None) -> int | None:
    return min((cap for cap in caps if cap is not None), default=None)


def _bound(candidate: Candidate, situation: Situation) -> int | None:
    """Tokens with which the answer is expected to reach the deadline, None if it may not grow so long.

    The learnt length is no bound: an answer may run on. What is expected to fit need not be cut to the upper figures,
    since whoever follows the answer ends it when the deadline comes.
    """
    if situation.objective.deadline_s is None:
        return None
    prediction = candidate.prediction
    left_s = max(0.0, situation.objective.deadline_s - situation.waited_s - prediction.ttft_s)
    tokens = max(1 + int(left_s / prediction.tpot_s), situation.settings.min_answer_tokens)
    return tokens if candidate.most_tokens is None or tokens < candidate.most_tokens else None


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


def shorten(ranked: Iterable[Candidate], situation: Situation) -> Choice | None:
    """The first candidate that can give an answer of useful length inside the deadline."""
    if situation.objective.deadline_s is None:
        return None
    floor = shortest_of_use(situation)
    for candidate in ranked:
        tokens = longest_answer(candidate, situation)
        if tokens >= floor and keeps(candidate, situation, floor):
            return choose(candidate, situation, "shorter-answer", max_tokens=tokens)
    return None


def late_or_hopeless(situation: Situation) -> Choice | Hopeless:
    """When nothing keeps the promise: serve late where that is still of use, else say when to come back.

    Late is of use when only a TTFT or TPOT is missed, and either nobody asked for it, or a replica is idle: then
    waiting would not help, and refusing would never show whether the prediction was right. A request of negative
    priority is not served late by a busy tier. A deadline is hard: it is lost when even an idle replica, at its median,
    is too slow for the shortest useful answer.

    Being late is no reason to give up quality that nobody agreed to give up; overload is.
    """
    slack = 1.0 if situation.overloaded else situation.settings.device_first_quality_slack
    best = max(c.info.quality for c in situation.candidates) - slack - 1e-9
    equals = [c for c in situation.candidates if c.info.quality >= best]
    soonest = min(equals, key=lambda c: (c.prediction.ttft_s, -c.info.quality))
    idle = soonest.prediction.free
    deadline_s = situation.objective.deadline_s
    floor = shortest_of_use(situation)
    feasible = [
        c for c in equals if deadline_s is None or situation.waited_s + c.prediction.finish_with(floor) <= deadline_s
    ]
    patient = not situation.ttft_promised and situation.objective.priority >= 0
    too_long = soonest.prediction.wait_s > _HOPELESS_WAIT * situation.wait_left_s
    if feasible and (idle or (patient and not too_long)):
        candidate = min(feasible, key=lambda c: (c.prediction.ttft_s, -c.info.quality))
        cap = None
        if deadline_s is not None:
            left_s = deadline_s - situation.waited_s - candidate.prediction.ttft_s
            tokens = max(floor, int(left_s / candidate.prediction.tpot_s))
            cap = tokens if tokens < situation.answer_tokens else None
        reason = reason_for(candidate, situation)
        return choose(candidate, situation, "late" if reason in _UNFORCED else reason, max_tokens=cap)
    idle_s = min(c.prediction.finish_with(floor) - c.prediction.wait_s for c in situation.candidates)
    lost = deadline_s is not None and situation.waited_s + idle_s > deadline_s
    return Hopeless(
        why=f"the soonest first token is expected in {soonest.prediction.ttft_high_s * 1e3:.0f} ms, "
        f"after {situation.waited_s * 1e3:.0f} ms of waiting; to be kept: {_to_keep(situation)}",
        retry_after_s=backlog_s(situation),
        deadline_lost=lost,
    )


def backlog_s(situation: Situation) -> float:
    """When a request like this one should find room, were it sent again then.

    A replica that is free and still does not serve it would not serve it later either: those that are busy count.
    """
    busy = [c.prediction.wait_s for c in situation.candidates if not c.prediction.free]
    return min(max(min(busy, default=0.0), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _to_keep(situation: Situation) -> str:
    objective = situation.objective
    ttft = "TTFT" if situation.ttft_promised else "this tier's default TTFT"
    limits = {ttft: objective.ttft_s, "TPOT": objective.tpot_s, "deadline": objective.deadline_s}
    return ", ".join(f"{name} {value_s * 1e3:.0f} ms" for name, value_s in limits.items() if value_s is not None) or (
        f"a free replica within {situation.wait_left_s:.1f} s"
    )
