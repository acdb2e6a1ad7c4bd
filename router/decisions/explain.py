"""Why a request went where it went, in five lines for a person."""

from __future__ import annotations

from router.decisions.line import CandidateRow, Decision

_WIDTH = 11
_FAILURES = ("attempt_failed", "failover")
_TURNS = ("sent", "hedge_won", "hedge_lost", *_FAILURES)
_TOLD = 0.01  # of an answer: less is not worth a word
_REJECTED = {
    "other-model": "serves another model",
    "locality": "was excluded by locality",
    "context": "has too short a window",
    "quality": "is below the quality floor",
    "lacks": "does not do what the request needs",
    "unhealthy": "could not take requests",
    "breaker-open": "was left alone after failures",
    "cooling-down": "had refused a moment ago",
    "already-failed": "had failed for this request",
    "canary": "was the other deployment of a canary",
}
_REFUSED = {
    "shed": "too many requests waited",
    "evicted": "a request of higher priority took its place",
    "deadline_lost": "its deadline could not be kept any more",
    "promise_lost": "the promise that it asked for could not be kept",
    "replicas_failed": "every replica that could serve it failed",
    "unavailable": "no replica could take it",
}


def five_lines(decision: Decision) -> list[str]:
    """Return what was asked, where it went and why, the best alternative, the prediction held against what happened,
    and how it ended.
    """
    return [
        _line("asked", _asked(decision)),
        _line("went", _went(decision)),
        _line("instead", _instead(decision)),
        _line("predicted", _predicted(decision)),
        _line("ended", _ended(decision)),
    ]


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"


def _asked(decision: Decision) -> str:
    asked, limit = decision.objective, decision.max_tokens
    about = "about " if decision.features.prompt_slack_tokens else ""
    answer = f"at most {_tokens(limit)}" if limit is not None else "no cap"
    promises = [
        f"first token within {_time(asked.ttft_ms)}" if asked.ttft_ms is not None else "",
        f"{asked.tpot_ms:g} ms a token" if asked.tpot_ms is not None else "",
        f"all of it within {_time(asked.deadline_ms)}" if asked.deadline_ms is not None else "",
        f"worth less for {_time(asked.late_value_ms)} more" if asked.late_value_ms is not None else "",
    ]
    promised = ", ".join(filter(None, promises))
    if not promised and asked.default_ttft_ms is not None:
        promised = f"no promise, so the tier's own: first token within {_time(asked.default_ttft_ms)}"
    bounds = [
        asked.locality if asked.locality != "any" else "",
        f"quality {asked.min_quality:g} or better" if asked.min_quality else "",
        f"priority {asked.priority}" if asked.priority else "",
    ]
    parts = [
        f"{decision.model}, prompt of {about}{_tokens(decision.prompt_tokens)}, answer: {answer}",
        promised or "no promise",
        ", ".join(filter(None, bounds)),
    ]
    return "; ".join(filter(None, parts))


def _went(decision: Decision) -> str:
    sent = [event for event in decision.events if event["event"] == "sent"]
    waited = f" after waiting {_time(sent[-1]['at_ms'])}" if sent and sent[-1]["at_ms"] >= 1 else ""
    chosen = decision.chosen
    if not sent:
        what = decision.error or _REFUSED.get(decision.error_code or "", decision.error_code or "it left before")
        where = f"; it waited for {chosen.replica}" if chosen is not None else ""
        return f"nowhere: {what}{where}"
    failed = [str(event["replica"]) for event in decision.events if event["event"] in _FAILURES]
    hedge = next((event for event in decision.events if event["event"] in {"hedge_won", "hedge_lost"}), None)
    served = str(hedge["replica"]) if hedge is not None and not failed else str(sent[-1]["replica"])
    last = next(event["event"] for event in reversed(decision.events) if event["event"] in _TURNS)
    too = ", which failed" if last in _FAILURES and failed.pop() else ""
    before = f", after {', '.join(failed)} failed" if failed else ""
    beside = ", the sooner of two that were asked" if hedge is not None else ""
    why = f": {chosen.why} ({chosen.reason})" if chosen is not None else ""
    if chosen is not None and chosen.kept_probability is not None:
        why += f"; its whole promise was {chosen.kept_probability:.0%} likely to be kept there"
    held_up = next((row.at_stake for row in decision.candidates if row.chosen), 0.0)
    if held_up >= _TOLD:
        why += f", and its prompt put {held_up:.2f} of the answers that ran there at stake"
    return f"to {served}{waited}{before}{too}{beside}{why}"


def _instead(decision: Decision) -> str:
    """Tell what the best other candidate would have cost: of those that keep the promise the best, else the soonest."""
    others = [row for row in decision.candidates if not row.chosen and row.finish_ms is not None]
    if others:
        best = min(others, key=_preference)
        cost = f"first token in {_time(best.ttft_ms)}, all in {_time(best.finish_ms)}"
        if best.not_chosen != "smaller":  # which says so itself
            cost += f", quality {best.quality:g}"
        because = f"; {best.why}" if best.why else ""
        return f"{best.replica}: {cost}{because}"
    rejected = [row for row in decision.candidates if row.rejected and row.rejected != "other-model"]
    if rejected:
        told = [f"{row.replica} {_REJECTED.get(str(row.rejected), row.rejected)}" for row in rejected[:3]]
        more = f", and {len(rejected) - 3} more" if len(rejected) > 3 else ""
        return f"nobody: {'; '.join(told)}{more}"
    return "nobody else serves this model" if decision.candidates else "no replica was looked at"


def _preference(row: CandidateRow) -> tuple[bool, float, float]:
    missed = row.not_chosen in {"ttft", "tpot", "deadline"}
    return (missed, -(row.quality or 0.0) if not missed else 0.0, row.finish_ms or 0.0)


def _predicted(decision: Decision) -> str:
    if decision.predicted_ttft_ms is None:
        return "nothing: no replica was chosen"
    predicted = f"first token in {_time(decision.predicted_ttft_ms)} (9 of 10 within "
    predicted += f"{_time(decision.predicted_ttft_high_ms)}), "
    predicted += "it never came" if decision.ttft_ms is None else f"it took {_time(decision.ttft_ms)}"
    if decision.predicted_finish_ms is None:
        return predicted
    expected = decision.features.expected_tokens
    answer = f" for {_tokens(expected)}" if expected is not None else ""
    predicted += f"; all in {_time(decision.predicted_finish_ms)}{answer}"
    if decision.tokens and decision.finish_ms is not None:
        predicted += f", it took {_time(decision.finish_ms)} for {_tokens(decision.tokens)}"
    return predicted


def _ended(decision: Decision) -> str:
    if decision.outcome == "running":
        return "not yet: it is still running"
    parts = [f"{decision.outcome} after {_time(decision.finish_ms)}"]
    if decision.cut:
        parts.append("cut by a cap or the deadline")
    if decision.refused or decision.outcome == "failed":
        if decision.error_code:
            parts[0] += f" ({decision.error_code})"
        if decision.retry_after_ms is not None:
            again = f"come back in {_time(decision.retry_after_ms)}"
            parts.append(again if decision.should_retry else f"{again}, though a retry cannot keep this deadline")
    kept = [name for name, held in decision.kept.items() if held]
    missed = [name for name, held in decision.kept.items() if not held]
    if kept or missed:
        parts.append(" and ".join(filter(None, [_listed("kept", kept), _listed("missed", missed)])))
    elif decision.outcome != "invalid":
        parts.append("nothing was promised")
    return "; ".join(parts)


def _listed(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(names)}" if names else ""


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count != 1 else ''}"


def _time(value_ms: float | None) -> str:
    if value_ms is None:
        return "an unknown time"
    return f"{value_ms / 1e3:,.1f} s" if value_ms >= 9_995 else f"{value_ms:,.0f} ms"
