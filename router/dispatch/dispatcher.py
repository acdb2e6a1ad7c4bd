"""The live router of a tier: composes admission, prediction, policy, health and replicas for each request.

`binding` decides where a request goes and when; `journey` follows it there, and on to the next replica when one
breaks; `feedback` learns from what happens on the way. This file is what they share, and what a tier sees.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import final

import structlog

from router.base.alarms import Alarms
from router.base.clock import Clock, MonotonicClock
from router.base.errors import ReplicaBroken, Unavailable
from router.decisions.line import Decision
from router.decisions.writer import DecisionSink
from router.dispatch.admission import Admission
from router.dispatch.attempts.blame import Verdict, source_of
from router.dispatch.attempts.hedge import LEAST_WAIT_S, HedgeBudget, device_seconds
from router.dispatch.binding.binder import Binder
from router.dispatch.journey.answer_chunks import chunks_of
from router.dispatch.journey.feedback import Feedback
from router.dispatch.journey.journey import Journey
from router.dispatch.journey.opened_answer import OpenedAnswer
from router.dispatch.journey.outcomes import Outcomes
from router.dispatch.probes.canary import CanaryProbes
from router.dispatch.probes.self_test import SelfTests
from router.dispatch.records.decision_value import decision_of
from router.dispatch.records.record import DecisionLog, DecisionRecord
from router.dispatch.records.telemetry import Telemetry
from router.dispatch.replicas.pool import MANY
from router.dispatch.status import StatusBoard
from router.signals.affinity import Affinity
from router.signals.breaker import BreakerState
from router.signals.canary import Canaries, Canary
from router.signals.health import HealthBook
from router.signals.in_flight import Attempt
from router.signals.latency import LatencyModel
from router.signals.length import LengthModel
from router.signals.signals import Signals
from router.tracing.sink import TraceSink
from router.upstream.source import SourceHooks, new_instance
from router.values.answer import Answer
from router.values.replica import Replica, ReplicaInfo, Unreached, holds_up, reach_of
from router.values.request import InferenceRequest, Locality, Outcome
from router.values.settings import RouterSettings
from router.values.status import RouterStatus
from router.wire.reach import Reach, beyond

log = structlog.get_logger("router")

_HEDGED_ATTEMPTS = 2  # a hedge takes one attempt out of the request's budget


@final
class Dispatcher:
    """Use as `async with`; `start` is the one entry for requests. All of it runs on one event loop.

    Attributes:
        instance: what this start of the tier calls itself towards others.
        tallies: the requests that ended, by outcome.
        load: how busy what is here is, as of now.

    Args:
        replicas: what may serve; `set_replicas` changes it at any time.
        telemetry: not shared with another dispatcher.
        decisions: where every ended request leaves a line; opened and closed by its owner.
        traces: where every ended request leaves its spans; the same.
        seed: of which replicas decisions look at, where there are many; None draws one.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        settings: RouterSettings,
        *,
        clock: Clock | None = None,
        telemetry: Telemetry | None = None,
        decisions: DecisionSink | None = None,
        traces: TraceSink | None = None,
        seed: int | None = None,
    ) -> None:
        self._traces = traces
        self.instance = new_instance()
        self.settings = settings
        self.clock = clock or MonotonicClock()
        self.telemetry = telemetry or Telemetry()
        self.alarms = Alarms(self.clock)
        self._outcomes = Outcomes(self.telemetry, self.clock, decisions, traces)
        self.tallies = self._outcomes.tallies
        self._signals = Signals(
            LatencyModel(self.clock),
            LengthModel(settings.expected_answer_tokens),
            HealthBook(settings.breaker, self.clock, self._breaker_changed),
            affinity=Affinity(self.clock),
            canaries=Canaries(self.clock, self._stepped_back),
        )
        self._binder = Binder(settings, self._signals, self.clock, self.alarms, self.telemetry, seed=seed)
        self._hedges = HedgeBudget()
        self._self_tests = SelfTests(settings, self.clock, self.alarms, self.telemetry, self.capacity_changed)
        self._probes = CanaryProbes(self._signals.canaries, self.clock, self.alarms, lambda: self._binder.pool.replicas)
        self.load = self._binder.pool.load
        self.admission = Admission(settings, self._signals, self.clock, self.load, self._binder.queue)
        self._feedback = Feedback(
            self._signals,
            self._binder,
            self._self_tests,
            self.admission,
            telemetry=self.telemetry,
            clock=self.clock,
        )
        self._board = StatusBoard(self._binder, self._signals)
        self.readiness = self._board.readiness
        self._log = DecisionLog(settings.decision_log)
        self._closed = False
        self._left_alone: set[str] = set()
        self._known_models: frozenset[str] = frozenset()
        self._came: Callable[[InferenceRequest], None] = _unheard
        self._signals.canaries.reconfigure(settings.canary)
        self.set_replicas(replicas)
        self._watch()

    async def __aenter__(self) -> Dispatcher:
        await self.alarms.__aenter__()
        self._probes.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await asyncio.sleep(0)  # those that were refused take their leave
        await self._self_tests.close()
        await self._probes.close()
        await self.alarms.__aexit__(kind, error, trace)

    def close(self) -> None:
        """Refuse who waits, and bind nobody from now on: an answer whose replica ends breaks off and says so."""
        self._closed = True
        self._self_tests.stop()
        self._probes.stop()
        self._binder.refuse_all(_shutting_down())

    async def start(self, request: InferenceRequest) -> Answer:
        """Route `request` and return when its first text is ready.

        Raises:
            InvalidRequest: no replica can ever serve it as it is.
            Refused: not now; says when to come back.
        """
        if self._closed:
            raise _shutting_down()
        record = DecisionRecord.of(request, self.settings.policy)
        if self._traces is not None:
            record.trace = self._traces.begin(request.headers)
        self._log.add(record)
        self._came(request)
        length = self._signals.lengths.watch(request, self._binder.pool.family(request.model))
        journey = Journey(self, self._feedback, request, record, length)
        chunks = chunks_of(journey)
        first = await anext(chunks)
        if journey.route is None:
            await chunks.aclose()
            raise ReplicaBroken("the replica ended without an answer")
        journey.answer = Answer(
            journey.route,
            OpenedAnswer(first, chunks, journey.let_tap),
            journey.ready,
            journey.used,
            when_computed=journey.when_computed,
            seamless=lambda: not journey.counts_own_text,
        )
        return journey.answer

    def decision(self, request_id: str, caller: str | None = "") -> DecisionRecord | None:
        """Return the record of a recent request of this caller, empty where there are no keys; None: of any caller."""
        return self._log.get(request_id, caller)

    def explain(self, request_id: str, caller: str | None = "") -> Decision | None:
        """Return what may be told of that record, as a value."""
        record = self.decision(request_id, caller)
        return None if record is None else decision_of(record)

    def reconfigure(self, settings: RouterSettings) -> None:
        """Change the settings; requests in flight stay, those that wait are decided by the new ones."""
        self._signals.canaries.reconfigure(settings.canary)
        self._binder.pool.redraw()
        if self._probes.running:
            self._probes.begin()
        self._binder.reconfigure(settings)
        self.settings = settings
        self._signals.health.set_settings(settings.breaker)
        self._signals.lengths.expected_tokens = float(settings.expected_answer_tokens)
        self.admission.reconfigure(settings)
        self._self_tests.settings = settings
        self._log.capacity = settings.decision_log
        self._log.trim()
        self.telemetry.reconfigurations.inc()

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        """Replace the replicas; requests in flight on one that left end there.

        Raises:
            ValueError: two replicas have one id.
        """
        by_id = {replica.info.replica_id: replica for replica in replicas}
        if len(by_id) != len(replicas):
            double = [name for name, count in Counter(r.info.replica_id for r in replicas).items() if count > 1]
            raise ValueError(f"replica ids must be unique; {', '.join(double)} is there twice")
        infos = [replica.info for replica in replicas]
        self._known_models = frozenset([name for info in infos for name in (info.family, info.variant)])
        self._signals.health.keep_only(infos)
        self._signals.what_if.set_replicas(infos if len(infos) <= MANY else ())
        for learnt in (self._signals.latency, self._signals.peaks, self._signals.affinity, self._feedback):
            learnt.keep_only(set(by_id))
        self._binder.set_replicas(by_id)

    @property
    def replicas(self) -> list[Replica]:
        return list(self._binder.pool.replicas.values())

    def known_models(self) -> frozenset[str]:
        """Every name a request may ask for: families and variants."""
        return self._known_models

    def expect(self, unreached: Callable[[], Sequence[Unreached]]) -> None:
        """Ask `unreached` at each decision for what is configured and was never reached: it might serve anything."""
        self._binder.pool.sources = unreached
        self._binder.wake()

    def source_hooks(self, on_change: Callable[[], None]) -> SourceHooks:
        """Return whom a source of replicas tells what it finds out: this router, and `on_change` of new replicas."""
        return SourceHooks(
            on_change=on_change,
            probe_succeeded=self.probe_succeeded,
            probe_failed=self.probe_failed,
            want=self.admission.want,
            misses_to_be_lost=lambda: self.settings.breaker.failures,
            instance=self.instance,
        )

    def tell_of_waiting(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a request has to wait: it may be for a credit of the tier above."""
        self._binder.queued = listener

    def tell_of_requests(
        self, came: Callable[[InferenceRequest], None], ended: Callable[[DecisionRecord], None]
    ) -> None:
        """Call `came` for each request, and `ended` with its record once no replica works on it any more."""
        self._came, self._outcomes.told = came, ended

    def unreached(self, locality: Locality) -> str:
        """Name the sources of which nothing is known yet, and why; empty where no request of `locality` may go."""
        return "; ".join(f"{source.who}: {source.text}" for source in self._binder.unreached(locality))

    def reach(self) -> Reach:
        """Return the tiers that requests may come to from here, this one included."""
        return beyond(self.instance, map(reach_of, self._binder.pool.replicas.values()))

    def step_s(self, info: ReplicaInfo, batch: int, slots: int) -> float:
        """Return the seconds of one decode step of so many sequences on a replica, by what was learnt of it."""
        return self._signals.latency.step_s(info, batch, slots)

    def limit_lines(self, lines: int | None) -> None:
        """Let each replica that can hold them up compute so many requests that yield; see `HoldsUp`."""
        for replica in self._binder.pool.replicas.values():
            if (holder := holds_up(replica)) is not None:
                holder.limit_lines(lines)

    def status(self) -> RouterStatus:
        """Return what an operator is told of the router and its replicas."""
        return self._board.read(self.settings.policy)

    @property
    def waiting(self) -> int:
        """Requests that wait for a replica."""
        return len(self._binder.queue)

    def capacity_changed(self) -> None:
        """Something about the replicas changed: decide for everyone who waits, soon. Call it on the event loop."""
        self._binder.wake()

    def probe_succeeded(self, endpoint: str) -> None:
        """A health probe of an endpoint was answered."""
        self._signals.health.breaker_of(endpoint).probe_succeeded()
        self.capacity_changed()

    def probe_failed(self, endpoint: str, why: str) -> None:
        """A health probe of an endpoint failed."""
        self._signals.health.breaker_of(endpoint).probe_failed(why)
        self.capacity_changed()

    def breaker_states(self) -> dict[str, str]:
        """State of every endpoint's breaker."""
        return self._signals.health.states()

    # ── what a journey asks of it ───────────────────────────────────────────────────────────────────────────────────

    async def bind(self, journey: Journey) -> Attempt:
        """Wait for a replica; no longer than `max_wait_ms`, and not past the request's deadline.

        Raises:
            OverspillError: there is none for this request, now or ever.
        """
        if self._closed:
            raise _shutting_down()
        request, began_s = journey.request, self.clock.now_s()
        until_s = began_s + self.settings.max_wait_ms / 1e3
        if request.objective.defer:  # who can be answered later waits for no longer than the first token may take
            promised_s = request.objective.ttft_s or self.settings.ttft_slo_ms / 1e3
            until_s = min(until_s, request.accepted_at_s + promised_s)
        ends_s = request.objective.ends_s
        if ends_s is not None:
            until_s = min(until_s, request.accepted_at_s + ends_s)
        attempt = await self._binder.bind(journey.pending(until_s), journey.record)
        self.admission.waited(self.clock.now_s() - began_s)
        return attempt

    def hedge_due_s(self, journey: Journey, attempt: Attempt) -> float:
        """When the first token of an attempt is late enough for a second one; infinity: it is not to be hedged.

        A request that failed somewhere, or goes on with a broken answer, is not: its prompt may be the reason. Nor is
        background work.
        """
        settings = self.settings.hedge
        prediction = attempt.choice.candidate.prediction
        self._hedges.earn(device_seconds(prediction, attempt.expected_tokens), settings.budget)
        clean = journey.tries.spent == 0 and not journey.request.continuation and not attempt.trial
        background = journey.request.objective.priority < 0
        alone = self._binder.pool.devices < 2  # a second attempt goes to another one
        if not settings.enabled or alone or background or not clean or journey.tries.left < _HEDGED_ATTEMPTS:
            return math.inf
        return attempt.sent_at_s + max(prediction.ttft_high_s, LEAST_WAIT_S)

    def hedge(self, journey: Journey, late: Attempt) -> Attempt | None:
        """Take a slot for a second attempt beside `late`: on another device that has room now, where nobody waits."""
        if self._closed or self._signals.health.has_failed(source_of(journey.request, Verdict.FAILED)):
            return None
        second = self._binder.hedge(journey.pending(self.clock.now_s()), late, self._hedges)
        if second is not None:
            replica, beside = second.info.replica_id, late.info.replica_id
            journey.record.happened(self.clock.now_s(), "hedged", replica=replica, beside=beside)
        return second

    def has_alternative(self, journey: Journey) -> bool:
        """Whether any other replica may still serve what is left of the request."""
        return self._binder.has_candidate(journey.pending(self.clock.now_s()))

    def computed(self, journey: Journey, now_s: float) -> None:
        """See `Outcomes`."""
        self._outcomes.computed(journey, now_s)

    def ended(self, journey: Journey, outcome: Outcome, error: str | None) -> None:
        """A request left the tier: exactly once for each `start`."""
        self._outcomes.ended(journey, outcome, error)
        self._feedback.left(journey)

    def _breaker_changed(self, endpoint: str, state: BreakerState, why: str) -> None:
        """Say once that an endpoint is left alone, and once that it is back; what is tried in between is detail.

        An endpoint that does not answer probes was told of by the client that probes it.
        """
        self.telemetry.breaker_changes.labels(endpoint, state.value).inc()
        known = endpoint in self._left_alone
        level = logging.DEBUG
        if state is BreakerState.CLOSED and known:
            self._left_alone.remove(endpoint)
            level = logging.INFO
        elif state is BreakerState.OPEN and not known and not self._signals.health.breaker_of(endpoint).unreachable:
            self._left_alone.add(endpoint)
            level = logging.WARNING
        self._binder.reconsider()
        log.log(level, "breaker", endpoint=endpoint, state=state.value, why=why)

    def _stepped_back(self, canary: Canary) -> None:
        name = canary.settings.name
        self.telemetry.canary_step_backs.labels(name, canary.by).inc()
        log.warning("canary stepped back", canary=name, test=canary.by, why=canary.why)
        self._binder.pool.redraw()
        self._binder.reconsider()

    def _watch(self) -> None:
        """Register the gauges."""
        self.telemetry.watch_breakers(lambda: self.breaker_states().items())
        self.telemetry.watch_canaries(self._signals.canaries)
        self._board.watch(self.telemetry)
        self.admission.watch(self.telemetry)


def _unheard(_: object) -> None:
    """Nobody counts requests."""


def _shutting_down() -> Unavailable:
    return Unavailable("this tier is shutting down; send the request to another one", retry_after_s=1.0)
