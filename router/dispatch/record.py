"""Why a request went where it went: candidates, predictions, rejections, events, outcome."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.policy.promise import is_smaller, wanted_tokens
from router.values.choice import Choice
from router.values.replica import ReplicaInfo
from router.values.request import InferenceRequest, Objective, Outcome
from router.values.situation import Candidate, Situation

# code → what it means: the `reason` of a decision record and of `x-overspill-reason`.
REASONS = {
    "device-first": "a local replica keeps the objective, with a quality as good as the best or near it",
    "best-quality": "the best quality that keeps the objective; there was no choice of tier to make",
    "context": "only the upstream's windows hold prompt and answer",
    "overflow": "the device is too busy to keep the objective",
    "objective": "the device is idle, and still too slow for the objective",
    "device-down": "no local replica can take requests",
    "upstream-down": "the upstream cannot take requests, and what is left here is a smaller rung",
    "step-down": "no full-quality rung keeps the objective, this smaller one does",
    "shorter-answer": "the answer is capped, so that the deadline, the window or an overloaded tier can hold it",
    "given-up": "its deadline could no longer be kept, and its slot was given to others; the text so far",
    "late": "no replica keeps the objective; this one comes closest",
    "pinned": "the request names this exact variant",
    "local-only": "the request's locality, or the policy, keeps it here",
    "cloud-only": "the request's locality asks for the cloud",
    "cloud-first": "the policy prefers the cloud, and that keeps the objective",
    "smallest-rung": "the policy prefers the smallest rung that keeps the objective",
    "failover": "the replica chosen before this one failed or refused",
}

# code → what it means: the `rejected` of a candidate that could not be chosen.
REJECTIONS = {
    "other-model": "serves another model, or the caller named one exact variant",
    "locality": "the caller's locality, or the policy's, excludes it",
    "context": "prompt and answer do not fit its context window",
    "quality": "below the caller's quality floor",
    "unhealthy": "it cannot take requests now",
    "breaker-open": "its endpoint failed and is left alone for a while",
    "cooling-down": "it refused a moment ago and said when to come back",
    "already-failed": "it failed for this very request",
}

# code → what it means: the `not_chosen` of a candidate that could have been.
NOT_CHOSEN = {
    "ttft": "its first token is predicted too late",
    "tpot": "it is predicted to be too slow between tokens",
    "deadline": "its last token is predicted too late",
    "smaller": "a better rung keeps the objective",
    "remote": "the device keeps the objective",
    "ranked-lower": "the policy prefers the chosen one",
}

_MAX_EVENTS = 64
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a replica is no candidate: a code of `REJECTIONS`, and what was seen.

    Attributes:
        temporary: it may pass (health, breaker, cool-down); the others are properties of the request.
        waits: it is expected to pass so soon that the request may wait for it.
        again_s: seconds until then, where that is known.
    """

    info: ReplicaInfo
    code: str
    text: str
    temporary: bool = False
    waits: bool = False
    again_s: float = 0.0


@dataclass(slots=True)
class DecisionRecord:
    """One request's story. It holds no part of the prompt or the answer.

    Attributes:
        caller: whose request it was; not told.
        promised_ttft_s, promised_ttft_high_s: accepted → first token, as first predicted.
        ttft_s, finish_s: accepted → first text, end.
        kept: `ttft`, `tpot`, `deadline`, where the caller asked for it → whether it was kept.
        decisions: how often it was decided about.
    """

    request_id: str
    model: str
    objective: Objective
    prompt_tokens: int
    max_tokens: int | None
    accepted_at_s: float
    policy: str
    caller: str = field(default="", repr=False)
    situation: Situation | None = None
    rejections: tuple[Rejection, ...] = ()
    choice: Choice | None = None
    events: list[dict[str, object]] = field(default_factory=list)
    promised_ttft_s: float | None = None
    promised_ttft_high_s: float | None = None
    outcome: Outcome | None = None
    error: str | None = None
    ttft_s: float | None = None
    finish_s: float | None = None
    tokens: int = 0
    kept: dict[str, bool] = field(default_factory=dict)
    decisions: int = 0

    @classmethod
    def of(cls, request: InferenceRequest, policy: str) -> DecisionRecord:
        return cls(
            request_id=request.request_id,
            model=request.model,
            objective=request.objective,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            accepted_at_s=request.accepted_at_s,
            policy=policy,
            caller=request.caller,
        )

    def looked(self, situation: Situation | None, rejections: tuple[Rejection, ...]) -> None:
        """Keep the candidates of the last decision; a request that waits is decided many times."""
        self.situation, self.rejections = situation, rejections
        self.decisions += 1

    def promise(self, choice: Choice, waited_s: float) -> None:
        """Keep the first prediction."""
        if self.promised_ttft_s is None:
            self.promised_ttft_s = waited_s + choice.candidate.prediction.ttft_s
            self.promised_ttft_high_s = waited_s + choice.candidate.prediction.ttft_high_s

    def happened(self, at_s: float, event: str, **details: object) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append({"at_ms": _ms(at_s - self.accepted_at_s), "event": event, **details})

    def judge(self, last_s: float | None) -> None:
        """Note which promises were kept.

        What was refused or broke was not. Of a caller that left early, only what is sure by then counts.

        Args:
            last_s: accepted → last token.
        """
        asked, ended_s = self.objective, self.finish_s or 0.0
        whole, left = self.outcome in {Outcome.COMPLETED, Outcome.DEGRADED}, self.outcome is Outcome.CANCELLED
        for name, limit_s, took_s in (
            ("ttft", asked.ttft_s, self.ttft_s),
            ("deadline", asked.deadline_s, (last_s or ended_s) if whole else None),
        ):
            if limit_s is not None and not (left and took_s is None and ended_s <= limit_s):
                self.kept[name] = took_s is not None and took_s <= limit_s
        if asked.tpot_s is not None and not left:
            spread_s = (last_s or 0.0) - (self.ttft_s or 0.0)
            self.kept["tpot"] = whole and spread_s <= asked.tpot_s * max(self.tokens - 1, 0) + _ROUNDING_S

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values; times in milliseconds since the request was accepted."""
        objective = self.objective
        return {
            "request_id": self.request_id,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "policy": self.policy,
            "objective": {
                "ttft_ms": _ms_or_none(objective.ttft_s),
                "default_ttft_ms": self._default_ttft_ms(),
                "tpot_ms": _ms_or_none(objective.tpot_s),
                "deadline_ms": _ms_or_none(objective.deadline_s),
                "late_value_ms": _ms_or_none(objective.late_s),
                "shorten": objective.shorten,
                "priority": objective.priority,
                "locality": objective.locality.value,
                "min_quality": objective.min_quality,
            },
            "candidates": self._candidates(),
            "chosen": self._chosen(),
            "events": list(self.events),
            "outcome": self.outcome.value if self.outcome else "running",
            "error": self.error,
            "predicted_ttft_ms": _ms_or_none(self.promised_ttft_s),
            "predicted_ttft_high_ms": _ms_or_none(self.promised_ttft_high_s),
            "ttft_ms": _ms_or_none(self.ttft_s),
            "finish_ms": _ms_or_none(self.finish_s),
            "tokens": self.tokens,
            "kept": dict(self.kept),
        }

    def _default_ttft_ms(self) -> float | None:
        """The tier's own TTFT, where it stood in for one that the caller did not ask for."""
        situation = self.situation
        return None if situation is None or situation.ttft_promised else _ms_or_none(situation.objective.ttft_s)

    def _chosen(self) -> dict[str, object] | None:
        if self.choice is None:
            return None
        info = self.choice.candidate.info
        return {
            "replica": info.replica_id,
            "tier": info.tier,
            "variant": info.variant,
            "rung": info.rung,
            "reason": self.choice.reason,
            "why": REASONS.get(self.choice.reason, ""),
            "degraded": self.choice.degraded,
            "max_tokens": self.choice.max_tokens,
        }

    def _candidates(self) -> list[dict[str, object]]:
        rows = [_candidate(c, self.situation, self.choice) for c in self.situation.candidates] if self.situation else []
        rows += [
            {
                "replica": r.info.replica_id,
                "tier": r.info.tier,
                "variant": r.info.variant,
                "rejected": r.code,
                "why": r.text,
            }
            for r in self.rejections
        ]
        return rows


class DecisionLog:
    """The most recent records, by caller and request id: ids are the callers' own, and two may choose one id.

    When it is full, the oldest record of the caller who has most goes: nobody pushes out the records of others.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: dict[str, OrderedDict[str, DecisionRecord]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[DecisionRecord]:
        return (record for own in self._records.values() for record in own.values())

    def add(self, record: DecisionRecord) -> None:
        own = self._records.setdefault(record.caller, OrderedDict())
        self._size += record.request_id not in own
        own[record.request_id] = record
        own.move_to_end(record.request_id)
        self.trim()

    def trim(self) -> None:
        while self._size > self.capacity:
            caller = max(self._records, key=lambda name: len(self._records[name]))
            self._records[caller].popitem(last=False)
            self._size -= 1
            if not self._records[caller]:
                del self._records[caller]

    def get(self, request_id: str, caller: str = "") -> DecisionRecord | None:
        own = self._records.get(caller)
        return None if own is None else own.get(request_id)


def why_not(candidate: Candidate, chosen: Candidate, situation: Situation) -> tuple[str, str]:
    """Return a code of `NOT_CHOSEN` and the figures behind it.

    A promise that the chosen one misses too is no reason against another: what came next decided.
    """
    tokens = wanted_tokens(situation)
    missed_anyway = _misses(chosen, situation, tokens)
    for code, figures in _misses(candidate, situation, tokens).items():
        if code not in missed_anyway:
            return code, figures
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
    return missed


def _candidate(candidate: Candidate, situation: Situation | None, choice: Choice | None) -> dict[str, object]:
    info, prediction = candidate.info, candidate.prediction
    row: dict[str, object] = {
        "replica": info.replica_id,
        "tier": info.tier,
        "variant": info.variant,
        "rung": info.rung,
        "quality": info.quality,
        "free": prediction.free,
        "wait_ms": _ms(prediction.wait_s),
        "ttft_ms": _ms(prediction.ttft_s),
        "ttft_high_ms": _ms(prediction.ttft_high_s),
        "tpot_ms": _ms(prediction.tpot_s),
        "tpot_high_ms": _ms(prediction.tpot_high_s),
        "finish_ms": _ms(prediction.finish_s),
        "finish_high_ms": _ms(prediction.finish_high_s),
    }
    if choice is not None and situation is not None:
        if choice.candidate.info.replica_id == info.replica_id:
            row["chosen"] = True
        else:
            row["not_chosen"], row["why"] = why_not(candidate, choice.candidate, situation)
    return row


def _ms(value_s: float) -> float:
    return round(value_s * 1e3, 1)


def _ms_or_none(value_s: float | None) -> float | None:
    return None if value_s is None else _ms(value_s)
