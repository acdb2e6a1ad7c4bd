"""Why a request went where it went: candidates, predictions, rejections, events, outcome."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from router.base.errors import OverspillError, Refused
from router.base.structs import FrozenStruct
from router.decisions.line import Features
from router.signals.canary import CanaryState
from router.values.choice import Choice
from router.values.chunk import FinishReason
from router.values.link import LinkSnapshot
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import ANSWERED, InferenceRequest, Objective, Outcome
from router.values.situation import Situation
from router.values.trace import TraceContext

# code → what it means: the `reason` of a decision record and of `x-overspill-reason`.
REASONS = {
    "device-first": "a local replica keeps the objective, with a quality as good as the best or near it",
    "best-quality": "the best quality that keeps the objective; there was no choice of tier to make",
    "context": "only the upstream's windows hold prompt and answer",
    "overflow": "the device is too busy to keep the objective",
    "objective": "the device is idle, and the upstream is likelier to keep the objective, or displaces less",
    "device-down": "no local replica can take requests",
    "upstream-down": "the upstream cannot take requests, and what is left here is a smaller rung",
    "step-down": "a smaller rung: no better one keeps the objective, or its device serves more with this one",
    "shorter-answer": "the answer is capped, so that the deadline, the window or an overloaded tier can hold it",
    "given-up": "its deadline could no longer be kept, and its slot was given to others; the text so far",
    "explore": "nothing was heard of this replica for long, and the request has time to find out how it is",
    "late": "no replica keeps the objective; this one comes closest",
    "pinned": "the request names this exact variant",
    "local-only": "the request's locality, or the policy, keeps it here",
    "cloud-only": "the request's locality asks for the cloud",
    "cloud-first": "the policy prefers the cloud, and that keeps the objective",
    "smallest-rung": "the policy prefers the smallest rung that keeps the objective",
    "hedge": "the first token of the replica chosen before was late; this one, asked beside it, was sooner",
    "cache": "the very same was asked before, and its answer given again; no replica was asked",
    "failover": "the replica chosen before this one failed or refused",
}

# code → what it means: the `rejected` of a candidate that could not be chosen.
REJECTIONS = {
    "other-model": "serves another model, or the caller named one exact variant",
    "task": "its model does something else than what is asked for, such as embeddings",
    "locality": "the caller's locality, or the policy's, excludes it",
    "context": "prompt and answer do not fit its context window",
    "quality": "below the caller's quality floor",
    "lacks": "its server does not do something that the request needs",
    "unhealthy": "it cannot take requests now",
    "breaker-open": "its endpoint failed and is left alone for a while",
    "cooling-down": "it refused a moment ago and said when to come back",
    "already-failed": "it failed for this very request, or is like one that refused it as the caller's mistake",
    "canary": "it is the other deployment of a canary, or a canary that stepped back",
}

# code → what it means: the `not_chosen` of a candidate that could have been.
NOT_CHOSEN = {
    "ttft": "its first token is predicted too late",
    "tpot": "it is predicted to be too slow between tokens",
    "deadline": "its last token is predicted too late",
    "window": "its window is predicted to cut the answer",
    "beside": "its prompt would hold up those who run there",
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


ReplicaLoad = tuple[ReplicaSnapshot, LinkSnapshot | None]
"""What a decision saw of a replica: its load, and the link to it."""


class Event(FrozenStruct, frozen=True):
    """Something that happened to a request.

    Attributes:
        at_s: since it was accepted.
        details: what goes with it.
    """

    at_s: float
    name: str
    details: Mapping[str, object]

    @property
    def at_ms(self) -> float:
        """`at_s` as it is told."""
        return round(self.at_s * 1e3, 1)

    def told(self) -> dict[str, object]:
        return {"at_ms": self.at_ms, "event": self.name, **self.details}


class DecisionRecord(msgspec.Struct):
    """One request's story, as far as it went. It holds no part of the prompt or the answer.

    Attributes:
        caller: whose request it was; not told.
        features: what else a prediction depends on; what is known at a decision only is in `situation`.
        loads: every replica as the last decision saw it, candidate or not.
        promised_…: accepted → first token, last token, as first predicted.
        waited_s: accepted → sent to a replica.
        ttft_s, finish_s: accepted → first text, end.
        finished: why the answer ended, None where it did not.
        cut: a cap or the deadline ended it before its own end.
        error_code, retry_after_s, should_retry: what a refused caller was told.
        kept: `ttft`, `tpot`, `deadline`, where the caller asked for it → whether it was kept.
        decisions: how often it was decided about.
        trace: its place in a distributed trace, None where none is made.
        canary: the canary that the last decision met.
    """

    request_id: str
    model: str
    objective: Objective
    prompt_tokens: int
    max_tokens: int | None
    accepted_at_s: float
    policy: str
    caller: str = ""
    features: Features = Features()
    loads: tuple[ReplicaLoad, ...] = ()
    situation: Situation | None = None
    rejections: tuple[Rejection, ...] = ()
    choice: Choice | None = None
    events: list[Event] = []
    promised_ttft_s: float | None = None
    promised_ttft_high_s: float | None = None
    promised_finish_s: float | None = None
    promised_finish_high_s: float | None = None
    outcome: Outcome | None = None
    error: str | None = None
    error_code: str | None = None
    retry_after_s: float | None = None
    should_retry: bool | None = None
    waited_s: float = 0.0
    ttft_s: float | None = None
    finish_s: float | None = None
    tokens: int = 0
    finished: FinishReason | None = None
    cut: bool = False
    kept: dict[str, bool] = {}
    decisions: int = 0
    trace: TraceContext | None = None
    canary: CanaryState | None = None

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
            features=Features(
                prompt_bytes=request.prompt_bytes,
                prompt_slack_tokens=request.prompt_slack,
                ignore_eos=request.sampling.ignore_eos,
                stop=bool(request.sampling.stop),
            ),
        )

    def __repr__(self) -> str:
        return f"DecisionRecord({self.request_id!r})"

    def looked(
        self, situation: Situation | None, rejections: tuple[Rejection, ...], loads: tuple[ReplicaLoad, ...] = ()
    ) -> None:
        """Keep the candidates of the last decision; a request that waits is decided many times."""
        self.situation, self.rejections, self.loads = situation, rejections, loads
        self.decisions += 1

    def promise(self, choice: Choice, waited_s: float) -> None:
        """Keep the first prediction."""
        if self.promised_ttft_s is None:
            prediction = choice.candidate.prediction
            self.promised_ttft_s = waited_s + prediction.ttft_s
            self.promised_ttft_high_s = waited_s + prediction.ttft_high_s
            self.promised_finish_s = waited_s + prediction.finish_s
            self.promised_finish_high_s = waited_s + prediction.finish_high_s

    def failed_with(self, error: OverspillError) -> None:
        """Keep what the caller is told of a request that was refused or broke off."""
        self.error_code = error.code
        if isinstance(error, Refused):
            self.retry_after_s, self.should_retry = error.retry_after_s, error.should_retry

    def happened(self, at_s: float, event: str, **details: object) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(Event(at_s - self.accepted_at_s, event, details))

    @property
    def sent_ms(self) -> float | None:
        """Accepted → bound to the last replica that it was sent to, None where it was to none."""
        for event in reversed(self.events):
            if event.name == "sent":
                return event.at_ms
        return None

    def judge(self, last_s: float | None) -> None:
        """Note which promises were kept.

        What was refused or broke was not. Of a caller that left early, only what is sure by then counts.

        Args:
            last_s: accepted → last token.
        """
        asked, ended_s = self.objective, self.finish_s or 0.0
        whole, left = self.outcome in ANSWERED, self.outcome is Outcome.CANCELLED
        for name, limit_s, took_s in (
            ("ttft", asked.ttft_s, self.ttft_s),
            ("deadline", asked.deadline_s, (last_s or ended_s) if whole else None),
        ):
            if limit_s is not None and not (left and took_s is None and ended_s <= limit_s):
                self.kept[name] = took_s is not None and took_s <= limit_s
        if asked.tpot_s is not None and not left:
            spread_s = (last_s or 0.0) - (self.ttft_s or 0.0)
            self.kept["tpot"] = whole and spread_s <= asked.tpot_s * max(self.tokens - 1, 0) + _ROUNDING_S


class DecisionLog:
    """The most recent records, by caller and request id: ids are the callers' own, and two may choose one id.

    When it is full, the oldest record of the caller who has most goes: nobody pushes out the records of others.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: dict[str, OrderedDict[str, DecisionRecord]] = {}
        self._callers: dict[int, dict[str, None]] = {}  # by how many records they have
        self._most = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[DecisionRecord]:
        return (record for own in self._records.values() for record in own.values())

    def add(self, record: DecisionRecord) -> None:
        own = self._records.setdefault(record.caller, OrderedDict())
        if record.request_id in own:
            own.move_to_end(record.request_id)
        elif self._size >= self.capacity and 0 < len(own) == self._most:  # in place of its own oldest
            own.popitem(last=False)
        else:
            self._size += 1
            self._count(record.caller, len(own), len(own) + 1)
        own[record.request_id] = record
        self.trim()

    def trim(self) -> None:
        while self._size > self.capacity:
            caller = next(iter(self._callers[self._most]))
            own = self._records[caller]
            own.popitem(last=False)
            self._size -= 1
            self._count(caller, len(own) + 1, len(own))
            if not own:
                del self._records[caller]

    def _count(self, caller: str, before: int, now: int) -> None:
        """Note that a caller has one record more, or one less: whoever has most is known without asking everyone."""
        if before:
            del self._callers[before][caller]
            if not self._callers[before]:
                del self._callers[before]
        if now:
            self._callers.setdefault(now, {})[caller] = None
        self._most = max(self._most, now) if now > before or self._most in self._callers else now

    def get(self, request_id: str, caller: str | None = "") -> DecisionRecord | None:
        """Return the record of a request of this caller; None for `caller`: the latest of that id, whoever sent it."""
        if caller is None:
            found = [own[request_id] for own in self._records.values() if request_id in own]
            return max(found, key=lambda record: record.accepted_at_s, default=None)
        own = self._records.get(caller)
        return None if own is None else own.get(request_id)
