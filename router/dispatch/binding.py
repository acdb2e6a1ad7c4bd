"""Late binding: requests wait here, not inside replicas, and are bound to one the moment it can start them.

Whenever capacity changes, and every now and then because predictions age, everyone who waits is decided again in
order. A request is bound when the policy's choice is free; else it waits for that choice, and those behind it see that.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from router.base.clock import Clock
from router.base.errors import DeadlineLost, OverspillError, Shed, Unavailable
from router.base.timers import Alarms
from router.dispatch.candidates import Asked, Look, Sight, Unreached, assess, expected_tokens, explain_none
from router.dispatch.queue import Admission, Place
from router.dispatch.record import DecisionRecord
from router.dispatch.telemetry import Telemetry
from router.policy.promise import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, backlog_s
from router.policy.protocol import Choice, Hopeless
from router.policy.registry import load_policy
from router.signals.flights import Flight, Flights
from router.signals.health import HealthBook
from router.signals.ladder import Ladder
from router.signals.latency import Demand, LatencyModel
from router.values.replica import Replica, ReplicaSnapshot
from router.values.request import Locality
from router.values.settings import RouterSettings

log = structlog.get_logger("router")

# How often whoever waits is decided again when nothing else happens: predictions age, deadlines pass.
_RECHECK_S = 0.1
_SESSIONS_KEPT = 4096
_RETRY_AFTER_S = 1.0  # where nothing better is known
# Callers turned away for want of capacity count as waiting for so long: a tier that refuses at once is overloaded too.
_REFUSALS_COUNT_S = 2.0


class Evicted(Shed):
    """Pushed out of a full queue by a request of higher priority."""

    code = "evicted"


@dataclass(eq=False, slots=True)
class Ticket:
    """One request that waits for a replica.

    Attributes:
        place: its place in the queue, fulfilled with the flight.
        target: replica id it waits for, None before the first decision.
        promised, wait_factor: the first choice that it had to wait for, and `LatencyModel.wait_factor` then.
    """

    asked: Asked
    record: DecisionRecord
    place: Place[Flight]
    entered_s: float
    target: str | None = None
    promised: Choice | None = None
    wait_factor: float = 1.0


@dataclass(slots=True)
class Brain:
    """What decisions are made with."""

    settings: RouterSettings
    latency: LatencyModel
    health: HealthBook
    flights: Flights = field(default_factory=Flights)
    ladder: Ladder = field(default_factory=Ladder)


class Binder:
    """The tier's queue and its decisions."""

    def __init__(self, brain: Brain, clock: Clock, alarms: Alarms, telemetry: Telemetry) -> None:
        self.replicas: dict[str, Replica] = {}
        self.upstream: Callable[[], Unreached | None] = _nothing
        self.admission: Admission[Flight] = Admission()
        self._brain = brain
        self._clock = clock
        self._alarms = alarms
        self._telemetry = telemetry
        self._policy = load_policy(brain.settings.policy)
        self._tickets: dict[Place[Flight], Ticket] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._refused_at_s: deque[float] = deque()
        self._unreadable: set[str] = set()
        self._scheduled = False
        self._rechecking = False

    def reconfigure(self, settings: RouterSettings) -> None:
        self._policy = load_policy(settings.policy)
        self._brain.settings = settings
        self.wake()

    def wake(self) -> None:
        """Decide for everyone who waits, soon. Call it on the event loop."""
        if len(self.admission) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def bind(self, asked: Asked, record: DecisionRecord) -> Flight:
        """Wait until the policy finds a free replica, and take a slot there.

        Raises:
            OverspillError: it is turned away, at once or after having waited.
        """
        now_s = self._clock.now_s()
        self._update_ladder()
        place: Place[Flight] = Place(asked.request, continuing=asked.request.continuation_tokens > 0)
        ticket = Ticket(asked, record, place, now_s)
        self.admission.enter(place)
        self._tickets[place] = ticket
        alarm = self._alarms.set(asked.wait_until_s, lambda: self._give_up(ticket))
        try:
            self._decide_for(ticket, self._look(self._ahead(ticket)))
            if not place.bound.done():
                self._update_ladder()
                self._turn_away(ticket)
            if not place.bound.done():
                record.happened(now_s, "queued", waiting=len(self.admission), target=ticket.target)
                self._recheck_later()
            return await place.bound
        except asyncio.CancelledError:
            self._release_unclaimed(place)
            raise
        finally:
            alarm.cancel()
            self.admission.leave(place)
            del self._tickets[place]
            self._update_ladder()

    def has_candidate(self, asked: Asked) -> bool:
        """Whether any replica may serve what is left of a request."""
        situation, rejections = assess(asked, self._look(Counter()))
        return situation is not None or any(r.waits for r in rejections)

    def unreached(self, locality: Locality) -> Unreached | None:
        """Return the upstream of which nothing is known yet, if the policy and `locality` let a request go there."""
        return None if Locality.LOCAL_ONLY in {self._policy.locality, locality} else self.upstream()

    def refuse_all(self, error: OverspillError) -> None:
        """End the waiting of everyone."""
        for place in self.admission.in_order():
            place.bound.set_exception(error)

    def _pump(self) -> None:
        """Decide for everyone who waits, in order; each sees what those before it have taken or wait for."""
        self._scheduled = False
        ahead: Counter[str] = Counter()
        look = self._look(ahead)
        for place in self.admission.in_order(scarce=self._brain.ladder.overloaded):
            ticket = self._tickets[place]
            try:
                taken = self._decide_for(ticket, look)
            except Exception:  # one bad request must not starve those behind it
                log.exception("decision crashed", request_id=ticket.record.request_id)
                if not place.bound.done():
                    place.bound.set_exception(_internal_error(ticket.record.request_id))
                continue
            if taken:
                look.sights = self._sights()
            elif ticket.target is not None and not place.bound.done():
                ahead[ticket.target] += 1
        self._update_ladder()
        self._turn_away(None)

    def _decide_for(self, ticket: Ticket, look: Look) -> bool:
        """Bind, turn away or leave waiting; returns whether a slot was taken."""
        asked, record, place = ticket.asked, ticket.record, ticket.place
        situation, rejections = assess(asked, look)
        record.looked(situation, rejections)
        ticket.target = None
        if situation is None:
            if not any(r.waits for r in rejections):
                place.bound.set_exception(explain_none(asked, rejections))
            return False
        choice = self._policy.decide(situation)
        if isinstance(choice, Hopeless):
            kind = DeadlineLost if choice.deadline_lost else Unavailable
            if not choice.deadline_lost:
                self._refused_at_s.append(look.now_s)
            message = f"the promise cannot be kept: {choice.why}"
            place.bound.set_exception(kind(message, retry_after_s=_spread(choice.retry_after_s, record.request_id)))
            return False
        record.choice = choice
        record.promise(choice, situation.waited_s)
        prediction = choice.candidate.prediction
        if prediction.free:
            self._take(ticket, choice, look)
            return True
        if ticket.promised is None:
            ticket.promised = choice
            ticket.wait_factor = look.latency.wait_factor(choice.candidate.info)
            place.work_s = prediction.finish_s - prediction.wait_s
            objective = situation.objective
            ends = [s for s in (objective.deadline_s, objective.ttft_s) if s is not None]
            place.promise_s = min(ends, default=look.settings.ttft_slo_ms / 1e3)
        ticket.target = choice.candidate.info.replica_id
        return False

    def _take(self, ticket: Ticket, choice: Choice, look: Look) -> None:
        now_s = self._clock.now_s()
        asked, record, info = ticket.asked, ticket.record, choice.candidate.info
        sight = look.sight(info.replica_id)
        expected = expected_tokens(asked, info, self._brain.latency)
        if choice.max_tokens is not None:
            expected = max(1, min(expected, choice.max_tokens - asked.request.continuation_tokens))
        demand = Demand(asked.request.prompt_tokens, expected, asked.request.prompt_bytes)
        work = self._brain.latency.sent(sight.snapshot, sight.link, demand, sight.mine)
        self._remember_session(asked.request.objective.session, info.replica_id)
        if ticket.promised is not None:
            hoped = ticket.promised.candidate
            waited_s = now_s - ticket.entered_s
            self._brain.latency.observe_wait(hoped.info, hoped.prediction.wait_s, ticket.wait_factor, waited_s)
        if not ticket.place.continuing:
            self._count(choice, now_s - asked.request.accepted_at_s)
        record.happened(now_s, "sent", replica=info.replica_id, reason=choice.reason, max_tokens=choice.max_tokens)
        flight = Flight(
            replica=sight.replica,
            choice=choice,
            sent_at_s=now_s,
            work=work,
            prompt_tokens=demand.prompt_tokens,
            expected_tokens=expected,
            trial=self._brain.health.breaker(info).begin(),
        )
        self._brain.flights.begin(flight)  # last: nothing may fail between taking the slot and handing it over
        ticket.place.bound.set_result(flight)

    def _count(self, choice: Choice, waited_s: float) -> None:
        self._telemetry.queue_wait_s.observe(waited_s)
        if choice.reason == "step-down":
            self._telemetry.step_downs.labels(choice.candidate.info.variant).inc()

    def _turn_away(self, newcomer: Ticket | None) -> None:
        """Keep the queue inside its bounds: the least of a full class is refused, with a time to come back."""
        while (place := self.admission.crowded_out(self._brain.settings)) is not None:
            ticket = self._tickets[place]
            kind = Shed if ticket is newcomer else Evicted
            waiting = len(self.admission.in_order()) - 1
            retry_after_s = self._backlog_s(ticket)
            self._refused_at_s.append(self._clock.now_s())
            place.bound.set_exception(kind(f"the queue is full: {waiting} requests wait", retry_after_s=retry_after_s))

    def _give_up(self, ticket: Ticket) -> None:
        """The bound on a request's waiting has come."""
        if ticket.place.bound.done():
            return
        waited_s = self._clock.now_s() - ticket.asked.request.accepted_at_s
        deadline_s = ticket.asked.request.objective.deadline_s
        retry_after_s = self._backlog_s(ticket)
        if deadline_s is not None and waited_s >= deadline_s:
            message = f"the deadline of {deadline_s:g} s passed while the request waited for a free replica"
            ticket.place.bound.set_exception(DeadlineLost(message, retry_after_s=retry_after_s))
            return
        message = f"no replica became free within {waited_s:.1f} s"
        ticket.place.bound.set_exception(Unavailable(message, retry_after_s=retry_after_s))

    def _release_unclaimed(self, place: Place[Flight]) -> None:
        """A request was cancelled between being bound and being sent: give the slot back."""
        if place.bound.done() and not place.bound.cancelled() and place.bound.exception() is None:
            flight = place.bound.result()
            self._brain.flights.end(flight)
            if flight.trial:
                self._brain.health.breaker(flight.info).abandon()
            self.wake()

    def _backlog_s(self, ticket: Ticket) -> float:
        """When a request like this one should find a free replica, were it sent again then."""
        wait_s = _RETRY_AFTER_S
        try:
            situation, _ = assess(ticket.asked, self._look(self._ahead(ticket)))
            if situation is not None:
                wait_s = backlog_s(situation)
        except Exception:  # an estimate: the refusal it goes with must reach its caller in any case
            log.exception("estimate of the backlog crashed", request_id=ticket.record.request_id)
        return _spread(wait_s, ticket.record.request_id)

    def _ahead(self, newcomer: Ticket) -> Counter[str]:
        """What everyone else waits for."""
        waiting = self._tickets.values()
        return Counter(
            t.target for t in waiting if t is not newcomer and t.target is not None and not t.place.bound.done()
        )

    def _look(self, ahead: Counter[str]) -> Look:
        return Look(
            now_s=self._clock.now_s(),
            sights=self._sights(),
            settings=self._brain.settings,
            latency=self._brain.latency,
            ladder=self._brain.ladder,
            ahead=ahead,
            session_replica=self._sessions,
            locality=self._policy.locality,
            unreached=self.upstream(),
        )

    def _sights(self) -> Sequence[Sight]:
        return [self._sight(replica) for replica in self.replicas.values()]

    def _sight(self, replica: Replica) -> Sight:
        """Look at a replica; one whose load cannot be read can take no request, and the others still can."""
        health, flights, name = self._brain.health, self._brain.flights, replica.info.replica_id
        try:
            sight = Sight.of(replica, health.of, flights.at)
        except Exception:
            if name not in self._unreadable:  # once, not at every look
                log.exception("load unreadable", replica=name)
            self._unreadable.add(name)
            unknown = ReplicaSnapshot(replica.info, available=False, slots=0, why="its load cannot be read")
            return Sight(replica, replica.info, unknown, None, health.of(unknown), flights.at(name))
        self._unreadable.discard(name)
        return sight

    def _remember_session(self, session: str | None, replica_id: str) -> None:
        if session is not None:
            self._sessions[session] = replica_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)

    def _update_ladder(self) -> None:
        ladder, refused = self._brain.ladder, self._refused_at_s
        since_s = self._clock.now_s() - _REFUSALS_COUNT_S
        while refused and refused[0] < since_s:
            refused.popleft()
        if ladder.update(len(self.admission) + len(refused), self._brain.settings):
            log.warning("overload", overloaded=ladder.overloaded, waiting=len(self.admission))
        if ladder.overloaded:
            self._recheck_later()  # refusals stop to count by time alone: somebody has to look, or it never ends

    def _recheck_later(self) -> None:
        if not self._rechecking:
            self._rechecking = True
            self._alarms.set(self._clock.now_s() + _RECHECK_S, self._recheck)

    def _recheck(self) -> None:
        self._rechecking = False
        self._update_ladder()
        if len(self.admission):
            self.wake()
            self._recheck_later()


def _nothing() -> None:
    """There is no upstream that was not reached."""


def _spread(retry_after_s: float, request_id: str) -> float:
    """Spread over a quarter more by request id: a burst that is turned away must not come back as a burst."""
    return _bounded(retry_after_s * (1 + zlib.crc32(request_id.encode()) / 2**34))


def _bounded(retry_after_s: float) -> float:
    if not math.isfinite(retry_after_s):
        return MAX_RETRY_AFTER_S
    return min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _internal_error(request_id: str) -> OverspillError:
    return OverspillError(f"internal error while choosing a replica; the log has the details under id {request_id}")
