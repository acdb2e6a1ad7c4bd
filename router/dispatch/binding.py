"""Late binding: requests wait in the tier's queue and are bound to a replica when it can start them.

Whenever capacity changes, and every now and then because predictions age, everyone who waits is decided again in
order. A request is bound when the policy's choice is free; else it waits for that choice, and those behind it see that.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from router.base.clock import Clock
from router.base.errors import DeadlineLost, Evicted, OverspillError, PromiseLost, Shed, Unavailable
from router.base.timers import Alarms
from router.dispatch.candidates import (
    PendingRequest,
    PoolView,
    ReplicaView,
    Unreached,
    assess,
    expected_tokens,
    explain_none,
)
from router.dispatch.queue import QueueEntry, RequestQueue
from router.dispatch.record import DecisionRecord
from router.dispatch.telemetry import Telemetry
from router.policy.promise import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, backlog_s
from router.policy.registry import load_policy
from router.signals.in_flight import Attempt
from router.signals.signals import Signals
from router.values.choice import Choice, Hopeless
from router.values.prediction import Demand
from router.values.replica import Replica, ReplicaSnapshot
from router.values.request import Locality
from router.values.settings import RouterSettings

log = structlog.get_logger("router")

# Interval of decisions for waiting requests while no capacity changes.
_RECHECK_S = 0.1
_SESSIONS_KEPT = 4096
# Requests decided beside those that wait for the replica where an attempt ended: the first might prefer it now.
_OTHERS_AN_END = 8
_RETRY_AFTER_S = 1.0  # where nothing better is known
# Refusals for want of capacity count as waiting requests for so long, in the measure of overload.
_REFUSALS_COUNT_S = 2.0


class Binder:
    """The tier's queue and its decisions."""

    def __init__(
        self, settings: RouterSettings, signals: Signals, clock: Clock, alarms: Alarms, telemetry: Telemetry
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.upstream: Callable[[], Unreached | None] = _nothing
        self.queue: RequestQueue = RequestQueue()
        self.queued: Callable[[], None] = _nothing
        self._settings = settings
        self._signals = signals
        self._clock = clock
        self._alarms = alarms
        self._telemetry = telemetry
        self._policy = load_policy(settings.policy)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._refused_at_s: deque[float] = deque()
        self._unreadable: set[str] = set()
        self._scheduled = False
        self._everyone = False
        self._freed: set[str] = set()
        self._rechecking = False

    def reconfigure(self, settings: RouterSettings) -> None:
        self._policy = load_policy(settings.policy)
        self._settings = settings
        self.wake()

    def wake(self, freed: str | None = None) -> None:
        """Schedule decisions for the waiting requests. Call it on the event loop.

        Args:
            freed: replica where an attempt ended, if that is all that happened. Then only those are decided that wait
                for it, while it has room, and a few ahead of them; every `_RECHECK_S` everyone is decided anyway.
        """
        if freed is None:
            self._everyone = True
        else:
            self._freed.add(freed)
        if len(self.queue) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def bind(self, pending: PendingRequest, record: DecisionRecord) -> Attempt:
        """Wait until the policy finds a free replica, and take a slot there.

        Raises:
            OverspillError: it is turned away, at once or after having waited.
        """
        now_s = self._clock.now_s()
        self._update_ladder()
        entry = QueueEntry(pending, record, now_s)
        self.queue.enter(entry)
        alarm = self._alarms.set(pending.wait_until_s, lambda: self._give_up(entry))
        try:
            self._decide_for(entry, self._pool(self._ahead(entry)))
            if not entry.bound.done():
                self._update_ladder()
                self._turn_away(entry)
            if not entry.bound.done():
                record.happened(now_s, "queued", waiting=len(self.queue), target=entry.target)
                self.queued()
                self._recheck_later()
            return await entry.bound
        except asyncio.CancelledError:
            self._release_unclaimed(entry)
            raise
        finally:
            alarm.cancel()
            self.queue.leave(entry)
            self._update_ladder()

    def has_candidate(self, pending: PendingRequest) -> bool:
        """Whether any replica may serve what is left of a request."""
        situation, rejections = assess(pending, self._pool(Counter()))
        return situation is not None or any(r.waits for r in rejections)

    def unreached(self, locality: Locality) -> Unreached | None:
        """Return the upstream of which nothing is known yet, if the policy and `locality` let a request go there."""
        return None if Locality.LOCAL_ONLY in {self._policy.locality, locality} else self.upstream()

    def refuse_all(self, error: OverspillError) -> None:
        """Refuse every waiting request with `error`."""
        for entry in self.queue.in_order():
            entry.bound.set_exception(error)

    def _pump(self) -> None:
        """Decide for the waiting requests, in order; each sees what those before it have taken or wait for."""
        self._scheduled = False
        ahead: Counter[str] = Counter()
        pool = self._pool(ahead)
        for entry in self._due(pool, ahead):
            try:
                taken = self._decide_for(entry, pool)
            except Exception:  # its own failure: those behind it are still decided
                log.exception("decision crashed", request_id=entry.record.request_id)
                if not entry.bound.done():
                    entry.bound.set_exception(_internal_error(entry.record.request_id))
                continue
            if taken:
                pool.replicas = self._views()
            elif entry.target is not None and not entry.bound.done():
                ahead[entry.target] += 1
        self._update_ladder()
        self._turn_away(None)

    def _due(self, pool: PoolView, ahead: Counter[str]) -> Iterator[QueueEntry]:
        """Yield, in order, which requests are to be decided now; those passed over are counted in `ahead`."""
        freed = None if self._everyone else frozenset(self._freed)
        self._everyone, self._freed = False, set()
        others = _OTHERS_AN_END
        for entry in self.queue.in_order(scarce=self._signals.ladder.overloaded):
            if freed is not None:
                if not any(view.has_room for view in pool.replicas if view.info.replica_id in freed):
                    return
                if entry.target is not None and entry.target not in freed:
                    others -= 1
                    if others < 0:
                        ahead[entry.target] += 1
                        continue
            yield entry

    def _decide_for(self, entry: QueueEntry, pool: PoolView) -> bool:
        """Bind, turn away or leave waiting; returns whether a slot was taken."""
        pending, record = entry.pending, entry.record
        situation, rejections = assess(pending, pool)
        record.looked(situation, rejections)
        entry.target = None
        if situation is None:
            if not any(r.waits for r in rejections):
                entry.bound.set_exception(explain_none(pending, rejections))
            return False
        choice = self._policy.decide(situation)
        if isinstance(choice, Hopeless):
            kind = DeadlineLost if choice.deadline_lost else PromiseLost
            if not choice.deadline_lost:
                self._refused_at_s.append(pool.now_s)
            message = f"the promise cannot be kept: {choice.why}"
            entry.bound.set_exception(kind(message, retry_after_s=_spread(choice.retry_after_s, record.request_id)))
            return False
        record.choice = choice
        record.promise(choice, situation.waited_s)
        prediction = choice.candidate.prediction
        if prediction.free:
            self._take(entry, choice, pool)
            return True
        if entry.promised is None:
            entry.promised = choice
            entry.wait_factor = pool.latency.wait_factor(choice.candidate.info)
            entry.work_s = prediction.finish_s - prediction.wait_s
            objective = situation.objective
            ends = [s for s in (objective.deadline_s, objective.ttft_s) if s is not None]
            entry.promise_s = min(ends, default=pool.settings.ttft_slo_ms / 1e3)
        entry.target = choice.candidate.info.replica_id
        return False

    def _take(self, entry: QueueEntry, choice: Choice, pool: PoolView) -> None:
        now_s = self._clock.now_s()
        pending, record, info = entry.pending, entry.record, choice.candidate.info
        view = pool.view(info.replica_id)
        expected = expected_tokens(pending, info, self._signals.latency)
        if choice.max_tokens is not None:
            expected = max(1, min(expected, choice.max_tokens - pending.request.continuation_tokens))
        demand = Demand(pending.request.prompt_tokens, expected, pending.request.prompt_bytes)
        work = self._signals.latency.sent(view.snapshot, view.link, demand, view.mine)
        self._remember_session(pending.request.objective.session, info.replica_id)
        hoped = entry.promised.candidate if entry.promised is not None else None
        if hoped is not None and hoped.info.replica_id == info.replica_id:
            waited_s = now_s - entry.entered_s
            self._signals.latency.observe_wait(info, hoped.prediction.wait_s, entry.wait_factor, waited_s)
        if not entry.continuing:
            self._count(choice, now_s - pending.request.accepted_at_s)
        record.happened(now_s, "sent", replica=info.replica_id, reason=choice.reason, max_tokens=choice.max_tokens)
        attempt = Attempt(
            replica=view.replica,
            choice=choice,
            sent_at_s=now_s,
            work=work,
            prompt_tokens=demand.prompt_tokens,
            expected_tokens=expected,
            trial=self._signals.health.breaker(info).begin(),
        )
        self._signals.in_flight.begin(attempt)  # last: nothing may fail between taking the slot and handing it over
        entry.bound.set_result(attempt)

    def _count(self, choice: Choice, waited_s: float) -> None:
        self._telemetry.queue_wait_s.observe(waited_s)
        if choice.reason == "step-down":
            self._telemetry.step_downs.labels(choice.candidate.info.variant).inc()

    def _turn_away(self, newcomer: QueueEntry | None) -> None:
        """Refuse the last in order of each class that is over its bound, with a time to come back."""
        while (entry := self.queue.crowded_out(self._settings)) is not None:
            kind = Shed if entry is newcomer else Evicted
            waiting = len(self.queue.in_order()) - 1
            retry_after_s = self._backlog_s(entry)
            self._refused_at_s.append(self._clock.now_s())
            entry.bound.set_exception(kind(f"the queue is full: {waiting} requests wait", retry_after_s=retry_after_s))

    def _give_up(self, entry: QueueEntry) -> None:
        """Refuse a request whose wait has reached its bound."""
        if entry.bound.done():
            return
        waited_s = self._clock.now_s() - entry.pending.request.accepted_at_s
        deadline_s = entry.pending.request.objective.deadline_s
        retry_after_s = self._backlog_s(entry)
        if deadline_s is not None and waited_s >= deadline_s:
            message = f"the deadline of {deadline_s:g} s passed while the request waited for a free replica"
            entry.bound.set_exception(DeadlineLost(message, retry_after_s=retry_after_s))
            return
        message = f"no replica became free within {waited_s:.1f} s"
        entry.bound.set_exception(Unavailable(message, retry_after_s=retry_after_s))

    def _release_unclaimed(self, entry: QueueEntry) -> None:
        """A request was cancelled between being bound and being sent: give the slot back."""
        if entry.bound.done() and not entry.bound.cancelled() and entry.bound.exception() is None:
            attempt = entry.bound.result()
            self._signals.in_flight.end(attempt)
            if attempt.trial:
                self._signals.health.breaker(attempt.info).abandon()
            self.wake()

    def _backlog_s(self, entry: QueueEntry) -> float:
        """When a request like this one should find a free replica, were it sent again then."""
        wait_s = _RETRY_AFTER_S
        try:
            situation, _ = assess(entry.pending, self._pool(self._ahead(entry)))
            if situation is not None:
                wait_s = backlog_s(situation)
        except Exception:  # an estimate: the refusal it goes with must reach its caller in any case
            log.exception("estimate of the backlog crashed", request_id=entry.record.request_id)
        return _spread(wait_s, entry.record.request_id)

    def _ahead(self, newcomer: QueueEntry) -> Counter[str]:
        """Count, by replica, the waiting requests other than `newcomer`."""
        return Counter(e.target for e in self.queue.in_order() if e is not newcomer and e.target is not None)

    def _pool(self, ahead: Counter[str]) -> PoolView:
        return PoolView(
            now_s=self._clock.now_s(),
            replicas=self._views(),
            settings=self._settings,
            latency=self._signals.latency,
            ladder=self._signals.ladder,
            ahead=ahead,
            session_replica=self._sessions,
            locality=self._policy.locality,
            unreached=self.upstream(),
        )

    def _views(self) -> Sequence[ReplicaView]:
        return [self._view(replica) for replica in self.replicas.values()]

    def _view(self, replica: Replica) -> ReplicaView:
        """Return a replica's view; one whose load cannot be read is unavailable."""
        health, in_flight, name = self._signals.health, self._signals.in_flight, replica.info.replica_id
        try:
            view = ReplicaView.of(replica, health.of, in_flight.at)
        except Exception:
            if name not in self._unreadable:  # once, not at every decision
                log.exception("load unreadable", replica=name)
            self._unreadable.add(name)
            unknown = ReplicaSnapshot(replica.info, available=False, slots=0, why="its load cannot be read")
            return ReplicaView(replica, replica.info, unknown, None, health.of(unknown), in_flight.at(name))
        self._unreadable.discard(name)
        told = view.snapshot.credits
        if told is not None:  # a request that is bound spends its credit when it is sent, which is soon
            left = max(0, told - in_flight.unopened_at(view.info.endpoint))
            view.snapshot = replace(view.snapshot, credits=left)
        return view

    def _remember_session(self, session: str | None, replica_id: str) -> None:
        if session is not None:
            self._sessions[session] = replica_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)

    def _update_ladder(self) -> None:
        ladder, refused = self._signals.ladder, self._refused_at_s
        since_s = self._clock.now_s() - _REFUSALS_COUNT_S
        while refused and refused[0] < since_s:
            refused.popleft()
        if ladder.update(len(self.queue) + len(refused), self._settings):
            log.warning("overload", overloaded=ladder.overloaded, waiting=len(self.queue))
        if ladder.overloaded:
            self._recheck_later()  # refusals expire by time alone, without any event

    def _recheck_later(self) -> None:
        if not self._rechecking:
            self._rechecking = True
            self._alarms.set(self._clock.now_s() + _RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        self._rechecking = False
        self._update_ladder()
        if len(self.queue):
            self.wake()
            self._recheck_later()


def _nothing() -> None:
    """There is no upstream that was not reached."""


def _spread(retry_after_s: float, request_id: str) -> float:
    """Return the time stretched by 0 to 25 % by request id, so that a refused burst comes back spread out."""
    return _bounded(retry_after_s * (1 + zlib.crc32(request_id.encode()) / 2**34))


def _bounded(retry_after_s: float) -> float:
    if not math.isfinite(retry_after_s):
        return MAX_RETRY_AFTER_S
    return min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _internal_error(request_id: str) -> OverspillError:
    return OverspillError(f"internal error while choosing a replica; the log has the details under id {request_id}")
