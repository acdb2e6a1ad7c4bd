"""A decision log, condensed to what a replay needs: requests with what became of them, and the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.base.errors import InvalidRequest
from router.decisions.line import CandidateRow, Decision
from router.decisions.reader import DecisionReader
from router.values.request import Locality, Objective

_ANSWERED = frozenset({"completed", "degraded"})
_REFUSED = frozenset({"shed", "unavailable", "evicted"})


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """One request on one replica; seconds on the log's own time. `first_s` is None where no token came."""

    replica: str
    sent_s: float
    first_s: float | None
    ended_s: float


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log.

    Attributes:
        accepted_s: seconds since 1970, or since the begin of a simulation.
        tokens: what the caller got.
        ended: the model ended the answer by itself: `tokens` is its true length.
        cut: a cap of the router, or the deadline, ended it.
        tier, variant, quality: of the replica it was sent to last; empty and 0 where it went nowhere.
        ttft_s, finish_s: accepted → first text, end.
        kept: the whole answer came, and every promise that was asked for was kept.
    """

    accepted_s: float
    model: str
    policy: str
    objective: Objective
    prompt_tokens: int
    prompt_bytes: int
    max_tokens: int | None
    ignore_eos: bool
    caller: str
    outcome: str
    tokens: int
    ended: bool
    cut: bool
    kept: bool
    ttft_s: float | None
    finish_s: float
    tier: str
    variant: str
    quality: float
    attempts: tuple[LoggedAttempt, ...]

    @property
    def whole(self) -> bool:
        return self.outcome in _ANSWERED and not self.cut

    @property
    def refused(self) -> bool:
        return self.outcome in _REFUSED

    @property
    def left(self) -> bool:
        """The caller went before the end."""
        return self.outcome == "cancelled"


@dataclass(slots=True)
class LoggedReplica:
    """A replica as the log shows it; figures of the rows in which they were there.

    Attributes:
        row: the last row that described it.
        slots: the most that it was seen with.
        steps_s, prefills_s: what a token, and a prompt token, were predicted to take when its device was idle.
        rtts_s, uplinks_bytes_per_s: the link.
        rows, down: in how many decisions it was looked at, and could not take requests.
    """

    row: CandidateRow
    slots: int = 1
    steps_s: list[float] = field(default_factory=list)
    prefills_s: list[float] = field(default_factory=list)
    rtts_s: list[float] = field(default_factory=list)
    uplinks_bytes_per_s: list[float] = field(default_factory=list)
    rows: int = 0
    down: int = 0

    @property
    def device(self) -> str:
        return self.row.device or self.row.endpoint or self.row.replica


@dataclass(slots=True)
class Log:
    """A whole log.

    Attributes:
        requests: in order of arrival; without those that no replica could ever serve (`invalid`).
        skipped: damaged lines. invalid: requests left out.
        default_ttft_s: the tier's own TTFT for those who asked for none, as it stood last.
    """

    requests: list[LoggedRequest] = field(default_factory=list)
    replicas: dict[str, LoggedReplica] = field(default_factory=dict)
    skipped: int = 0
    invalid: int = 0
    default_ttft_s: float | None = None

    @property
    def lasted_s(self) -> float:
        """First arrival to last."""
        return self.requests[-1].accepted_s - self.requests[0].accepted_s

    def policies(self) -> list[str]:
        """Return the policies that decided, the most frequent first."""
        counts: dict[str, int] = {}
        for request in self.requests:
            counts[request.policy] = counts.get(request.policy, 0) + 1
        return sorted(counts, key=lambda name: -counts[name])


def read_log(path: Path) -> Log:
    """Read a decision file and its older ones.

    Raises:
        ConfigError: there is none, or it cannot be read.
        InvalidRequest: nothing in it can be replayed.
    """
    reader = DecisionReader(path)
    log = condense(reader)
    log.skipped = reader.skipped
    if not log.requests or not log.replicas:
        damaged = f"; {reader.skipped} lines are damaged" if reader.skipped else ""
        raise InvalidRequest(f"{path} holds no request that a replica was looked at for ({reader.read} lines{damaged})")
    return log


def condense(decisions: Iterable[Decision]) -> Log:
    """Keep of each decision what a replay needs; of lines, those that ended and say when they began."""
    log = Log()
    for decision in decisions:
        if decision.accepted_unix_s is None or decision.finish_ms is None:
            continue
        if decision.outcome == "invalid":
            log.invalid += 1
            continue
        log.requests.append(_request(decision, decision.accepted_unix_s, decision.finish_ms / 1e3))
        _note_replicas(decision, log.replicas)
        if decision.objective.default_ttft_ms is not None:
            log.default_ttft_s = decision.objective.default_ttft_ms / 1e3
    log.requests.sort(key=lambda request: request.accepted_s)
    return log


def _request(decision: Decision, accepted_s: float, finish_s: float) -> LoggedRequest:
    asked, features = decision.objective, decision.features
    attempts = _attempts(decision.events, accepted_s, finish_s)
    served = next((r for r in decision.candidates if attempts and r.replica == attempts[-1].replica), None)
    whole = decision.outcome in _ANSWERED and not decision.cut
    return LoggedRequest(
        accepted_s=accepted_s,
        model=decision.model,
        policy=decision.policy,
        objective=Objective(
            ttft_s=_seconds(asked.ttft_ms),
            tpot_s=_seconds(asked.tpot_ms),
            deadline_s=_seconds(asked.deadline_ms),
            late_s=_seconds(asked.late_value_ms),
            shorten=asked.shorten,
            priority=asked.priority,
            locality=Locality(asked.locality),
            min_quality=asked.min_quality,
            session=features.session,
        ),
        prompt_tokens=decision.prompt_tokens,
        prompt_bytes=features.prompt_bytes,
        max_tokens=decision.max_tokens,
        ignore_eos=features.ignore_eos,
        caller=features.caller or "",
        outcome=decision.outcome,
        tokens=decision.tokens,
        ended=decision.finish_reason == "stop" and not decision.cut,
        cut=decision.cut,
        kept=whole and all(decision.kept.values()),
        ttft_s=_seconds(decision.ttft_ms),
        finish_s=finish_s,
        tier=served.tier if served else "",
        variant=served.variant if served else "",
        quality=(served.quality or 0.0) if served else 0.0,
        attempts=attempts,
    )


def _attempts(events: Iterable[Mapping[str, Any]], accepted_s: float, finish_s: float) -> tuple[LoggedAttempt, ...]:
    """Follow a request over its replicas, in the order in which its attempts ended; the last one served it.

    An attempt ends where it fails, where another one of a hedge was sooner, or with the request.
    """
    found: list[LoggedAttempt] = []
    running: dict[str, tuple[float, float | None]] = {}  # replica → sent, first token

    def end(replica: str, at_s: float) -> None:
        found.append(LoggedAttempt(replica, *running.pop(replica), at_s))

    for event in events:
        at_s, name, replica = accepted_s + event["at_ms"] / 1e3, event["event"], str(event.get("replica", ""))
        if name in {"sent", "hedged"}:
            running.setdefault(replica, (at_s, None))
        elif replica not in running:
            continue
        elif name == "first_token":
            running[replica] = (running[replica][0], at_s)
        elif name in {"attempt_failed", "failover"}:
            end(replica, at_s)
        elif name in {"hedge_won", "hedge_lost"}:
            for other in [one for one in running if one != replica]:
                end(other, at_s)
    for replica in list(running):
        end(replica, accepted_s + finish_s)
    return tuple(found)


def _note_replicas(decision: Decision, replicas: dict[str, LoggedReplica]) -> None:
    busy = {row.device for row in decision.candidates if row.running or row.queued}
    for row in decision.candidates:
        if not row.decode_tokens_per_s or not row.prefill_tokens_per_s or not row.context_tokens:
            continue  # an upstream that was never reached: nothing is known of it
        known = replicas.get(row.replica)
        if known is None:
            known = replicas[row.replica] = LoggedReplica(row)
        known.row = row
        known.rows += 1
        known.down += row.available is False or row.rejected in {"breaker-open", "unhealthy"}
        known.slots = max(known.slots, row.slots or 1)
        if row.rtt_ms is not None and row.uplink_bytes_per_s:
            known.rtts_s.append(row.rtt_ms / 1e3)
            known.uplinks_bytes_per_s.append(row.uplink_bytes_per_s)
        if row.device not in busy and row.tpot_ms and row.ttft_ms is not None and not row.wait_ms:
            known.steps_s.append(row.tpot_ms / 1e3)
            network_s = (row.rtt_ms or 0.0) / 1e3
            if row.uplink_bytes_per_s:
                network_s += decision.features.prompt_bytes / row.uplink_bytes_per_s
            prefill_s = row.ttft_ms / 1e3 - network_s
            if prefill_s > 0 and decision.prompt_tokens:
                known.prefills_s.append(prefill_s / decision.prompt_tokens)


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
