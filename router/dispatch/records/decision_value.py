"""From a live record to what is told of it: every candidate in a row, with the figures behind its place."""

from __future__ import annotations

from typing import Any

import msgspec

from router.decisions.line import AskedFor, CanaryRow, CandidateRow, ChosenRow, Decision
from router.dispatch.records.record import NOT_CHOSEN, REASONS, DecisionRecord, Rejection, ReplicaLoad
from router.policy.promise import is_smaller, wanted_tokens
from router.values.choice import Choice
from router.values.replica import ReplicaInfo
from router.values.situation import Candidate, Situation

_AT_STAKE = 0.05  # of an answer: less is no reason to tell


def decision_of(record: DecisionRecord, *, caller: str | None = None) -> Decision:
    """Return a record as a value.

    Args:
        caller: whose request it was, for a file that hides it; None tells nothing of it.
    """
    situation = record.situation
    features = msgspec.structs.replace(
        record.features,
        expected_tokens=situation.answer_tokens if situation else None,
        waiting=situation.waiting if situation else None,
        waited_ms=_ms(situation.waited_s) if situation else None,
        overloaded=situation is not None and situation.overloaded,
        decisions=record.decisions,
        session=record.objective.session,
        caller=caller or None,
    )
    return Decision(
        request_id=record.request_id,
        model=record.model,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        policy=record.policy,
        objective=_asked_for(record),
        features=features,
        candidates=_rows(record),
        chosen=_chosen(record.choice),
        canary=_canary(record),
        events=tuple([event.told() for event in record.events]),
        outcome=record.outcome.value if record.outcome else "running",
        error=record.error,
        error_code=record.error_code,
        retry_after_ms=_ms_or_none(record.retry_after_s),
        should_retry=record.should_retry,
        predicted_ttft_ms=_ms_or_none(record.promised_ttft_s),
        predicted_ttft_high_ms=_ms_or_none(record.promised_ttft_high_s),
        predicted_finish_ms=_ms_or_none(record.promised_finish_s),
        predicted_finish_high_ms=_ms_or_none(record.promised_finish_high_s),
        ttft_ms=_ms_or_none(record.ttft_s),
        finish_ms=_ms_or_none(record.finish_s),
        tokens=record.tokens,
        finish_reason=record.finished.value if record.finished else None,
        cut=record.cut,
        kept=dict(record.kept),
    )


def _asked_for(record: DecisionRecord) -> AskedFor:
    objective, situation = record.objective, record.situation
    defaulted = situation is not None and not situation.ttft_promised
    return AskedFor(
        ttft_ms=_ms_or_none(objective.ttft_s),
        default_ttft_ms=_ms_or_none(situation.objective.ttft_s) if situation is not None and defaulted else None,
        tpot_ms=_ms_or_none(objective.tpot_s),
        deadline_ms=_ms_or_none(objective.deadline_s),
        late_value_ms=_ms_or_none(objective.late_s),
        shorten=objective.shorten,
        priority=objective.priority,
        locality=objective.locality.value,
        min_quality=objective.min_quality,
    )


def _chosen(choice: Choice | None) -> ChosenRow | None:
    if choice is None:
        return None
    info = choice.candidate.info
    return ChosenRow(
        replica=info.replica_id,
        tier=info.tier,
        variant=info.variant,
        rung=info.rung,
        reason=choice.reason,
        why=REASONS.get(choice.reason, ""),
        degraded=choice.degraded,
        max_tokens=choice.max_tokens,
        rank=choice.rank,
        kept_probability=None if choice.kept is None else round(choice.kept, 3),
    )


def _canary(record: DecisionRecord) -> CanaryRow | None:
    met = record.canary
    return None if met is None else CanaryRow(met.name, met.side, round(met.weight, 6), met.why or None)


def _rows(record: DecisionRecord) -> tuple[CandidateRow, ...]:
    loads = {load[0].info.replica_id: load for load in record.loads}
    situation = record.situation
    candidates = situation.candidates if situation is not None else ()
    return tuple(
        [_candidate(c, situation, record.choice, loads.get(c.info.replica_id)) for c in candidates if situation]
        + [_rejected(r, loads.get(r.info.replica_id)) for r in record.rejections]
    )


def why_not(candidate: Candidate, chosen: Candidate, situation: Situation) -> tuple[str, str]:
    """Return a code of `NOT_CHOSEN` and the figures behind it.

    A promise that the chosen one misses too is no reason against another: what came next decided.
    """
    tokens = wanted_tokens(situation)
    missed_anyway = _misses(chosen, situation, tokens)
    for code, figures in _misses(candidate, situation, tokens).items():
        if code not in missed_anyway:
            return code, figures
    if candidate.at_stake > chosen.at_stake + _AT_STAKE:
        figures = f"those who run there would lose {candidate.at_stake:.2f} answers by its prompt"
        return "beside", f"{figures}, at the chosen one {chosen.at_stake:.2f}"
    if is_smaller(candidate, situation) and not is_smaller(chosen, situation):
        return "smaller", f"quality {candidate.info.quality:g}, the chosen one has {chosen.info.quality:g}"
    if candidate.info.remote and not chosen.info.remote and not missed_anyway:
        return "remote", NOT_CHOSEN["remote"]
    return "ranked-lower", NOT_CHOSEN["ranked-lower"]


def _misses(candidate: Candidate, situation: Situation, answer_tokens: int) -> dict[str, str]:
    """Return the limits that a candidate is predicted to miss, and by what figures."""
    prediction, objective = candidate.prediction, situation.objective
    ttft_s = situation.waited_s + prediction.ttft_high_s
    finish_s = situation.waited_s + prediction.finish_high_with(answer_tokens)
    missed = {}
    if objective.ttft_s is not None and ttft_s > objective.ttft_s:
        limit = "asked for" if situation.ttft_promised else "the default of this tier is"
        missed["ttft"] = f"first token within {_ms(ttft_s):.0f} ms (p90), {limit} {_ms(objective.ttft_s):.0f} ms"
    if objective.tpot_s is not None and prediction.tpot_high_s > objective.tpot_s:
        missed["tpot"] = f"{_ms(prediction.tpot_high_s)} ms a token (p90), asked for {_ms(objective.tpot_s)} ms"
    if objective.deadline_s is not None and finish_s > objective.deadline_s:
        figures = f"{answer_tokens} tokens finished within {_ms(finish_s):.0f} ms (p90)"
        missed["deadline"] = f"{figures}, asked for {_ms(objective.deadline_s):.0f} ms"
    whole_tokens = situation.emitted_tokens + answer_tokens
    if candidate.longest_answer < whole_tokens:
        fit = f"{candidate.longest_answer:.0f} tokens of an answer fit its window"
        missed["window"] = f"{fit}, {whole_tokens} are expected"
    return missed


def _candidate(
    candidate: Candidate, situation: Situation, choice: Choice | None, load: ReplicaLoad | None
) -> CandidateRow:
    prediction = candidate.prediction
    chosen = choice is not None and choice.candidate.info.replica_id == candidate.info.replica_id
    not_chosen = why = None
    if choice is not None and not chosen:
        not_chosen, why = why_not(candidate, choice.candidate, situation)
    return CandidateRow(
        **_described(candidate.info, load),
        chosen=chosen,
        free=prediction.free,
        wait_ms=_ms(prediction.wait_s),
        ttft_ms=_ms(prediction.ttft_s),
        ttft_high_ms=_ms(prediction.ttft_high_s),
        tpot_ms=_fine_ms(prediction.tpot_s),
        tpot_high_ms=_fine_ms(prediction.tpot_high_s),
        finish_ms=_ms(prediction.finish_s),
        finish_high_ms=_ms(prediction.finish_high_s),
        session=candidate.session,
        price=candidate.price,
        at_stake=round(candidate.at_stake, 3),
        not_chosen=not_chosen,
        why=why,
    )


def _rejected(rejection: Rejection, load: ReplicaLoad | None) -> CandidateRow:
    return CandidateRow(**_described(rejection.info, load), rejected=rejection.code, why=rejection.text)


def _described(info: ReplicaInfo, load: ReplicaLoad | None) -> dict[str, Any]:
    """What of a row holds for a replica whether it may serve the request or not."""
    described: dict[str, Any] = {
        "replica": info.replica_id,
        "tier": info.tier,
        "variant": info.variant,
        "family": info.family,
        "endpoint": info.endpoint,
        "device": info.device_key,
        "remote": info.remote,
        "rung": info.rung,
        "quality": info.quality,
        "context_tokens": info.context_tokens,
        "prefill_tokens_per_s": info.prior.prefill_tokens_per_s,
        "decode_tokens_per_s": info.prior.decode_tokens_per_s,
        "decode_batch_slope": info.prior.decode_batch_slope,
    }
    if load is not None:
        snapshot, link = load
        described |= {
            "available": snapshot.available,
            "slots": snapshot.slots,
            "running": snapshot.running,
            "queued": snapshot.queued,
            "queued_prefill_tokens": snapshot.queued_prefill_tokens,
            "pending_decode_tokens": snapshot.pending_decode_tokens,
            "kv_free_tokens": snapshot.kv_free_tokens,
            "load_age_ms": _ms(snapshot.age_s),
        }
        if link is not None:
            described |= {"rtt_ms": _fine_ms(link.rtt_s), "uplink_bytes_per_s": round(link.uplink_bytes_per_s)}
    return described


def _ms(value_s: float) -> float:
    return round(value_s * 1e3, 1)


def _fine_ms(value_s: float) -> float:
    """Of what is multiplied by hundreds of tokens."""
    return round(value_s * 1e3, 4)


def _ms_or_none(value_s: float | None) -> float | None:
    return None if value_s is None else _ms(value_s)
