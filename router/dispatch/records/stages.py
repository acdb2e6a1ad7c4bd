"""From the decision record of an ended request to the stages that become its spans: nothing is measured for them alone.

A request waits (`queue`), is decided (`bind`), perhaps travels to a tier above (`link`), is begun (`prefill`: sent →
first text) and goes on (`decode`: first text → end). What fails over goes through them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from router.dispatch.records.record import DecisionRecord, Event
from router.values.link import LinkSnapshot
from router.values.replica import ReplicaInfo
from router.values.request import Outcome
from router.values.trace import Stage

_SENT = {"sent", "hedged"}
_FAILED = {"attempt_failed", "failover"}
_HEDGED = {"hedge_won", "hedge_lost"}
_OF_AN_ATTEMPT = {"deadline", "given_up", "cap_exceeded"}


@dataclass(slots=True)
class _Attempt:
    """One request on one replica, as its events tell.

    Attributes:
        number: of events up to the one that began it: what its span's id was made of.
    """

    replica: str
    number: int
    begin_s: float
    first_s: float | None = None
    error: str = ""
    events: tuple[tuple[float, str], ...] = ()


def stages_of(record: DecisionRecord) -> list[Stage]:
    """Return the request, and then its stages in the order in which they ended."""
    story = _Story(record)
    for number, event in enumerate(record.events, 1):
        story.take(number, event)
    return story.end()


class _Story:
    """The events of one request, taken one by one."""

    def __init__(self, record: DecisionRecord) -> None:
        self._record = record
        self._finish_s = record.finish_s or 0.0
        self._stages = [_request(record, self._finish_s)]
        self._replicas = {load[0].info.replica_id: (load[0].info, load[1]) for load in record.loads}
        self._running: dict[str, _Attempt] = {}
        self._waiting_since_s: float | None = 0.0

    def take(self, number: int, event: Event) -> None:
        """Take the `number`-th event."""
        at_s, name, replica = event.at_s, event.name, str(event.details.get("replica", ""))
        attempt = self._running.get(replica)
        if name in _SENT:
            self._sent(at_s)
            self._running[replica] = _Attempt(replica, number, at_s)
        elif attempt is None:
            return
        elif name == "first_token":
            attempt.first_s = at_s
        elif name in _HEDGED:
            for other in [one for one in self._running.values() if one is not attempt]:
                other.events += ((at_s, "outrun"),)
                self._end(other, at_s)
        elif name in _OF_AN_ATTEMPT:
            attempt.events += ((at_s, name),)
        elif name in _FAILED:
            attempt.error = str(event.details.get("code", "failed"))
            self._end(attempt, at_s)
            self._waiting_since_s = None if self._running else at_s

    def end(self) -> list[Stage]:
        """The request has ended: return all of it."""
        for attempt in list(self._running.values()):
            self._end(attempt, self._finish_s)
        if self._waiting_since_s is not None:  # refused, or the caller left, before a replica took it
            self._stages.append(Stage("queue", min(self._waiting_since_s, self._finish_s), self._finish_s))
        return self._stages

    def _sent(self, at_s: float) -> None:
        if self._waiting_since_s is not None:
            self._stages.extend(_waited(self._record, self._waiting_since_s, at_s))
            self._waiting_since_s = None

    def _end(self, attempt: _Attempt, end_s: float) -> None:
        del self._running[attempt.replica]
        end_s = max(end_s, attempt.begin_s, attempt.first_s or 0.0)
        known = self._replicas.get(attempt.replica)
        self._stages.extend(_attempt(self._record, attempt, end_s, known, len(self._stages)))


def _request(record: DecisionRecord, finish_s: float) -> Stage:
    chosen = record.choice
    attributes: dict[str, str | int | float | bool] = {
        "overspill.request_id": record.request_id,
        "overspill.outcome": record.outcome.value if record.outcome else "running",
        "overspill.policy": record.policy,
        "overspill.priority": record.objective.priority,
        "overspill.locality": record.objective.locality.value,
        "overspill.decisions": record.decisions,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.tokens,
    }
    if record.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = record.max_tokens
    if record.finished is not None:
        attributes["gen_ai.response.finish_reason"] = record.finished.value
    if record.ttft_s is not None:
        attributes["overspill.ttft_ms"] = round(record.ttft_s * 1e3, 1)
    if record.promised_ttft_s is not None:
        attributes["overspill.predicted_ttft_ms"] = round(record.promised_ttft_s * 1e3, 1)
    if chosen is not None:
        attributes["overspill.reason"] = chosen.reason
        attributes["overspill.replica"] = chosen.candidate.info.replica_id
        attributes["gen_ai.response.model"] = chosen.candidate.info.variant
    attributes |= {f"overspill.kept.{promise}": kept for promise, kept in record.kept.items()}
    own_fault = record.outcome in {Outcome.INVALID, Outcome.CANCELLED}
    error = "" if own_fault or record.error is None else record.error_code or record.error
    span_id = record.trace.span_id if record.trace is not None else None
    return Stage("request", 0.0, finish_s, "server", None, span_id, attributes, error)


def _waited(record: DecisionRecord, since_s: float, sent_s: float) -> Iterator[Stage]:
    """Tell the wait in line from the last decision; only of the last one of all is known when it was taken."""
    situation = record.situation
    decided_s = sent_s if situation is None else situation.now_s - record.accepted_at_s
    if not since_s <= decided_s <= sent_s:
        decided_s = sent_s
    yield Stage("queue", since_s, decided_s)
    yield Stage("bind", decided_s, sent_s, attributes={"overspill.decisions": record.decisions})


def _attempt(
    record: DecisionRecord,
    attempt: _Attempt,
    end_s: float,
    known: tuple[ReplicaInfo, LinkSnapshot | None] | None,
    index: int,
) -> Iterator[Stage]:
    """Tell one attempt: over a link, its stages lie within the span of that.

    Args:
        index: where the first of them will stand among the stages.
    """
    attributes: dict[str, str | int | float | bool] = {"overspill.replica": attempt.replica}
    parent = 0
    if known is not None:
        info, link = known
        attributes |= {"overspill.tier": info.tier, "overspill.rung": info.rung, "gen_ai.response.model": info.variant}
        if info.remote:
            parent = index
            span_id = record.trace.link_id(attempt.number) if record.trace is not None else None
            over: dict[str, str | int | float | bool] = {**attributes, "server.address": info.endpoint}
            if link is not None:
                over["overspill.link.rtt_ms"] = round(link.rtt_s * 1e3, 3)
            yield Stage("link", attempt.begin_s, end_s, "client", 0, span_id, over, attempt.error, attempt.events)
    first_s = end_s if attempt.first_s is None else attempt.first_s
    last = Stage("prefill", attempt.begin_s, first_s, parent=parent, attributes=attributes)
    if attempt.first_s is not None:
        yield last
        last = Stage("decode", first_s, end_s, parent=parent, attributes=attributes)
    yield replace(last, error=attempt.error, events=attempt.events)
