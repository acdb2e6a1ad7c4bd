"""What became of each request: its promises judged, told to whoever listens, counted, logged and written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import structlog

from router.base.clock import Clock
from router.decisions.writer import DecisionSink
from router.dispatch.journey.journey import Journey
from router.dispatch.records.decision_value import decision_of
from router.dispatch.records.record import DecisionRecord
from router.dispatch.records.stages import stages_of
from router.dispatch.records.telemetry import Telemetry
from router.tracing.sink import TraceSink
from router.values.answer import Route
from router.values.request import ANSWERED, Outcome
from router.values.status import Tally

log = structlog.get_logger("router")


class Outcomes:
    """Closes the record of each request that leaves a tier.

    Args:
        decisions: where every ended request leaves a line.
        traces: where every ended request leaves its spans.
    """

    def __init__(
        self, telemetry: Telemetry, clock: Clock, decisions: DecisionSink | None, traces: TraceSink | None
    ) -> None:
        self.told: Callable[[DecisionRecord], None] = _unheard
        self._telemetry = telemetry
        self._clock = clock
        self._decisions = decisions
        self._traces = traces
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._tell = log.info  # looked up once: structlog would put a logger together anew for each line

    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        """Return what each variant of each tier has done since the start."""
        return self._tallies

    def computed(self, journey: Journey, now_s: float) -> None:
        """No replica works on an answer any more: how long it took is known, however slowly its caller reads it."""
        record = journey.record
        record.finish_s = now_s - journey.request.accepted_at_s
        self.told(record)

    def ended(self, journey: Journey, outcome: Outcome, error: str | None) -> None:
        """A request left the tier."""
        now_s = self._clock.now_s() if journey.ended_at_s is None else journey.ended_at_s
        record, route = journey.record, journey.route
        record.outcome, record.error, record.tokens, record.cut = outcome, error, journey.tokens, journey.cut
        if record.finish_s is None:
            self.computed(journey, now_s)
        record.happened(now_s, "finished", outcome=outcome.value)
        if outcome is not Outcome.INVALID:
            last_at_s = journey.last_at_s
            record.judge(None if last_at_s is None else last_at_s - journey.request.accepted_at_s)
        self._count(record, outcome, route)
        if route is not None:
            self._tally(record, outcome, route, now_s)
        if self._decisions is not None:
            self._decisions.append(partial(decision_of, record, caller=record.caller))
        if self._traces is not None and record.trace is not None:
            since_s = self._clock.now_s() - journey.request.accepted_at_s
            self._traces.ended(record.trace, since_s, partial(stages_of, record))

    def _count(self, record: DecisionRecord, outcome: Outcome, route: Route | None) -> None:
        telemetry, finish_s = self._telemetry, record.finish_s or 0.0
        tier, variant = (route.tier, route.variant) if route else ("none", "none")
        told = outcome.value
        reason = route.reason if route else told
        telemetry.requests.labels(told, tier, variant, reason).inc()
        self._tell(
            "request",
            request_id=record.request_id,
            outcome=told,
            tier=tier,
            model=variant,
            reason=reason,
            prompt_tokens=record.prompt_tokens,
            answer_tokens=record.tokens,
            ttft_ms=None if record.ttft_s is None else round(record.ttft_s * 1e3, 1),
            finish_ms=round(finish_s * 1e3, 1),
            error=record.error,
        )
        for promise, kept in record.kept.items():
            telemetry.promises.labels(promise, "yes" if kept else "no").inc()
        if record.cut:
            telemetry.shortened.inc()
        if outcome in ANSWERED and not record.objective.in_slack:
            telemetry.e2e_s.labels(tier, variant).observe(finish_s)

    def _tally(self, record: DecisionRecord, outcome: Outcome, route: Route, now_s: float) -> None:
        finish_s = record.finish_s or 0.0
        if outcome in ANSWERED:
            ended = Tally(answered=1, answered_s=finish_s, waited_s=record.waited_s, last_at_s=now_s)
        else:
            ended = Tally(failed=1, failed_s=finish_s, last_at_s=now_s)
        key = (route.tier, route.variant)
        self._tallies[key] = self._tallies[key] + ended if key in self._tallies else ended


def _unheard(_: DecisionRecord) -> None:
    """Nobody counts requests."""
