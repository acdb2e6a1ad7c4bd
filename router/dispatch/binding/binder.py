"""Late binding: requests wait in the tier's queue and are bound to a replica when it can start them.

A decision either binds a request, turns it away, or says for which replicas it waits and with which rank there. A free
slot then looks only at those who stand first for it: the first is decided again, and bound if it still stands first
(lazy evaluation of a greedy choice; Minoux, 1978). Newcomers stand in the same order as everyone. Whoever may become
hopeless is decided again at the time that its last decision named. All of it is done in turns of a few decisions, so
that the event loop stays free however many wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from router.base.alarms import Alarm, Alarms
from router.base.clock import Clock
from router.base.errors import OverspillError
from router.dispatch.assessment.candidates import assess
from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.assessment.rejections import explain_none
from router.dispatch.attempts.give_up import give_up_lost
from router.dispatch.attempts.hedge import HedgeBudget, device_seconds
from router.dispatch.binding.free_slots import FreeSlots
from router.dispatch.binding.imagining import Imagining
from router.dispatch.binding.queue import QueueEntry, RequestQueue
from router.dispatch.binding.refusals import Refusals
from router.dispatch.binding.slots import Slots, expected_tokens
from router.dispatch.records.record import DecisionRecord
from router.dispatch.records.telemetry import Telemetry
from router.dispatch.replicas.pool import Pool
from router.policy.registry import load_policy
from router.signals.in_flight import Attempt
from router.signals.signals import Signals
from router.values.choice import Choice, Hopeless
from router.values.replica import Replica, ReplicaInfo, Unreached
from router.values.request import Locality
from router.values.settings import RouterSettings

log = structlog.get_logger("router")

# Interval in which overload is judged while requests wait, and free slots are looked for that nobody told of.
_RECHECK_S = 0.5
# Decisions in one turn of the event loop, each with what it wakes.
_DECISIONS_A_TURN = 8
# And what they may take: on a slow device others wait for the event loop no longer than on a fast one. A timer that is
# due within a turn may find the next one before it, so that it is two turns late; and each may be a decision longer.
_TURN_S = 0.001
# Requests whose time to be decided again has come, taken up in one turn.
_DUE_A_TURN = 64
# Requests decided again for one free slot before the best of them takes it.
_LOOKS_A_SLOT = 6
_LIKELY = 0.5  # promise kept, from which on somebody may go first for their age


class Binder:
    """The tier's queue and its decisions."""

    def __init__(
        self,
        settings: RouterSettings,
        signals: Signals,
        clock: Clock,
        alarms: Alarms,
        telemetry: Telemetry,
        *,
        seed: int | None = None,
    ) -> None:
        self.queued: Callable[[], None] = _nothing
        self.queue: RequestQueue = RequestQueue()
        self.pool = Pool(settings, signals, clock, self.queue, seed)
        self._settings = settings
        self._signals = signals
        self._clock = clock
        self._alarms = alarms
        self._telemetry = telemetry
        self._policy = load_policy(settings.policy)
        self.pool.locality = self._policy.locality
        self._refusals = Refusals(clock, self.queue, self.pool)
        self._slots = Slots(signals, clock, telemetry, self.queue, self.pool)
        self._scheduled = False
        self._free = FreeSlots(self.queue, self.pool, signals, clock)
        self._imagining = Imagining(self._policy, signals.what_if)
        self._again: deque[QueueEntry] = deque()
        self._looks = 0
        self._decided: list[QueueEntry] = []  # at the moment of the last decision
        self._rechecking = False
        self._due_alarm: Alarm | None = None
        self._due_at_s = math.inf

    def reconfigure(self, settings: RouterSettings) -> None:
        self._policy = self._imagining.policy = load_policy(settings.policy)
        self._settings = self.pool.settings = settings
        self.pool.locality = self._policy.locality
        self.reconsider()

    def set_replicas(self, replicas: dict[str, Replica]) -> None:
        """Replace what requests may be bound to."""
        self.pool.set_replicas(replicas)
        self.reconsider()

    def wake(self, freed: str | None = None) -> None:
        """Schedule decisions for the waiting requests. Call it on the event loop.

        Args:
            freed: replica where an attempt ended, if that is all that happened: its device has a slot. None: any
                replica may have one.
        """
        pool = self.pool
        self.queue.stand_back()
        if freed is None:
            pool.changed()
            self._free.add(pool.replicas)
        elif freed in pool.replicas:
            device = pool.replicas[freed].info.device_key
            pool.changed(device)
            self._free.add(pool.on_device(device))
        if len(self.queue):
            self._schedule()

    def reconsider(self) -> None:
        """Decide everyone who waits again, a few a turn: what they may wait for has changed."""
        self._again = deque(self.queue)
        self.wake()

    def _schedule(self) -> None:
        if not self._scheduled:
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
        if not entry.in_slack:
            self._signals.shares.asked(entry.request.caller)
        alarm: Alarm | None = None
        try:
            self._newcomer(entry)
            if not entry.bound.done():
                self._update_ladder()
                self._refusals.crowd_out(entry)
            if not entry.bound.done():
                alarm = self._alarms.set(pending.wait_until_s, partial(self._refusals.waited_too_long, entry))
                record.happened(now_s, "queued", waiting=len(self.queue), target=entry.target)
                self.queued()
                self._recheck_later()
            return await entry.bound
        except asyncio.CancelledError:
            self._release_unclaimed(entry)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            self.queue.leave(entry)
            self.pool.kv.left(entry)
            del entry  # it holds what it was refused with, and that, by its traceback, this frame
            if not pending.request.objective.in_slack:
                self._signals.shares.left(pending.request.caller)
            self._update_ladder()

    def hedge(self, pending: PendingRequest, late: Attempt, budget: HedgeBudget) -> Attempt | None:
        """Take a slot for a second attempt beside `late`, under all the constraints of a first one.

        It goes to another device that can start it now, and only while nobody waits and the budget has its cost.
        """
        if self.queue.wanted or self._signals.ladder.overloaded:
            return None
        self.pool.begin_moment()
        situation, _ = assess(pending, self.pool.look())
        others = situation.candidates if situation is not None else ()
        others = tuple(c for c in others if c.prediction.free and self._is_elsewhere(c.info, late.info))
        if situation is None or not others:
            return None
        choice = self._policy.decide(msgspec.structs.replace(situation, candidates=others))
        if isinstance(choice, Hopeless) or not choice.starts:
            return None
        expected = expected_tokens(pending, choice)
        if not budget.spend(device_seconds(choice.candidate.prediction, expected)):
            return None
        attempt = self._slots.attempt(pending, choice)
        self._slots.begin(attempt)
        return attempt

    def _is_elsewhere(self, info: ReplicaInfo, late: ReplicaInfo) -> bool:
        """Whether a replica shares neither device nor link with one that is late, and has no trial to pass."""
        same_link = info.remote and info.endpoint == late.endpoint
        return info.device_key != late.device_key and not same_link and self._signals.health.is_sound(info)

    def has_candidate(self, pending: PendingRequest) -> bool:
        """Whether any replica may serve what is left of a request."""
        situation, rejections = assess(pending, self.pool.look())
        return situation is not None or any(r.waits for r in rejections)

    def unreached(self, locality: Locality) -> list[Unreached]:
        """Return the sources of which nothing is known yet, as far as the policy and `locality` let a request there."""
        return [source for source in self.pool.sources() if source.within(locality, self._policy.locality)]

    def refuse_all(self, error: OverspillError) -> None:
        """Refuse every waiting request with `error`."""
        for entry in list(self.queue):
            self._refusals.refuse(entry, error)

    def _newcomer(self, entry: QueueEntry) -> None:
        """Decide a newcomer; where somebody who waits stands before it, it waits behind them."""
        self._imagining.now()
        self.pool.begin_moment()
        choice = self._decide(entry)
        if choice is None:
            return
        if choice.starts:
            device = choice.candidate.info.device_key
            firsts = [self._free.first_at(name) for name in self.pool.on_device(device)]
            if all(first is None or entry.key(choice.rank) <= first[0] for first in firsts):
                self._slots.take(entry, choice)
                return
            self._free.add(self.pool.on_device(device))
            self._schedule()
        self._wait(entry, choice)

    def _pump(self) -> None:
        """One turn: who stands first for the slots that are free, then who was to be looked at again."""
        self._scheduled = False
        self.pool.begin_moment()
        self._looks, ends_s = _DECISIONS_A_TURN, self._clock.now_s() + _TURN_S
        while self._looks > 0 and len(self._free) and self._clock.now_s() < ends_s:
            self._fill_a_slot(ends_s)
        self._looks = max(self._looks, _DECISIONS_A_TURN // 2)
        ends_s = max(ends_s, self._clock.now_s() + _TURN_S / 2)
        while self._looks > 0 and self._again and self._clock.now_s() < ends_s:
            entry = self._again.popleft()
            if not entry.bound.done():
                self._look_again(entry)
        if self._again or len(self._free):
            self._schedule()
        self._update_ladder()
        self._refusals.crowd_out(None)

    def _fill_a_slot(self, ends_s: float) -> None:
        """Give one free slot to who stands first for it, or find that nobody takes any.

        Args:
            ends_s: when nobody is decided any more: the best of those who were takes it.
        """
        for look in range(_LOOKS_A_SLOT):
            if look and self._clock.now_s() >= ends_s:
                break
            entry = self._free.first()
            if entry is None:
                self._free.clear()
                return
            if entry.moment == self.pool.moment and entry.choice is not None:
                self._slots.take(entry, entry.choice)
                return
            choice = self._decide(entry)
            if choice is not None:
                self._wait(entry, choice)
        now = self.pool.moment
        decided = [e for e in self._decided if e.moment == now and e.takes_a_slot and not e.bound.done()]
        if decided:
            first = min(decided, key=lambda e: (e.own_key(), e.order))
            assert first.choice is not None  # noqa: S101 - `takes_a_slot` says so
            self._slots.take(first, first.choice)
        elif self._free.first() is None:
            self._free.clear()

    def _look_again(self, entry: QueueEntry) -> None:
        choice = self._decide(entry)
        if choice is None:
            return
        self._wait(entry, choice)
        if choice.starts:
            self._free.add((choice.candidate.info.replica_id,))

    def _wait(self, entry: QueueEntry, choice: Choice) -> None:
        """Let an entry wait as its decision says."""
        self.pool.kv.waits(entry, choice, entry.pending.kv_tokens(self._settings), self._clock.now_s())
        if entry.promised is None and not choice.starts:
            entry.promised = choice
            entry.wait_factor = self._signals.latency.wait_factor(choice.candidate.info)
        by_age = self._settings.fairness.oldest_first > 0.0 and (choice.kept is None or choice.kept > _LIKELY)
        lines, look_again_s = self.pool.lines(choice.waits_for), self._clock.now_s() + choice.good_for_s
        self.queue.place(entry, lines, look_again_s, by_age=by_age)
        self._watch_due()

    def _decide(self, entry: QueueEntry) -> Choice | None:
        """Ask the policy; None where the entry was turned away, or can only wait for time to pass."""
        self._looks -= 1
        self.queue.displace(entry)
        try:
            return self._judge(entry, self.pool.look())
        except Exception:  # its own failure: the others are still decided
            log.exception("decision crashed", request_id=entry.record.request_id)
            self._refusals.refuse(entry, _internal_error(entry.record.request_id))
            return None

    def _judge(self, entry: QueueEntry, pool: Pool) -> Choice | None:
        pending, record = entry.pending, entry.record
        self._telemetry.decisions.inc()
        if entry.moment >= 0 and not entry.continuing:
            self._signals.lengths.renew(pending.length, entry.request, pool.family(entry.request.model))
        situation, rejections = assess(pending, pool)
        record.looked(situation, rejections, pool.loads_of(situation, rejections))
        record.canary = pool.canary_of(entry.request)
        if self._decided and self._decided[0].moment != pool.moment:
            self._decided.clear()
        entry.moment = pool.moment
        self._decided.append(entry)
        if situation is None:
            pool.kv.left(entry)
            if not any(r.waits for r in rejections):
                self._refusals.refuse(entry, explain_none(pending, rejections))
            else:
                self.queue.place(entry, {}, pool.now_s + _RECHECK_S)
                self._watch_due()
            return None
        if not (entry.offered or entry.continuing or entry.in_slack):
            entry.offered = True
            self._imagining.soon(situation)
        choice = self._policy.decide(situation)
        if isinstance(choice, Hopeless):
            self._refusals.hopeless(entry, choice)
            return None
        if self._refusals.below_the_lost(entry, situation):
            return None
        entry.choice = record.choice = choice
        record.promise(choice, situation.waited_s)
        return choice

    def _watch_due(self) -> None:
        """Keep one alarm at the time when the next entry is to be decided again."""
        due_s = self.queue.next_due_s()
        if due_s < self._due_at_s:
            if self._due_alarm is not None:
                self._due_alarm.cancel()
            self._due_at_s = due_s
            self._due_alarm = self._alarms.set(due_s, self._look_at_due)

    def _look_at_due(self) -> None:
        self._due_at_s, self._due_alarm = math.inf, None
        now_s = self._clock.now_s()
        for _ in range(_DUE_A_TURN):
            entry = self.queue.pop_due(now_s)
            if entry is None:
                break
            self._again.append(entry)
        if self._again:
            self._schedule()
        self._watch_due()

    def _release_unclaimed(self, entry: QueueEntry) -> None:
        """A request was cancelled between being bound and being sent: give the slot back."""
        if entry.bound.done() and not entry.bound.cancelled() and entry.bound.exception() is None:
            self._slots.give_back(entry.bound.result())
            self.wake()

    def _update_ladder(self) -> None:
        ladder = self._signals.ladder
        if ladder.update(self.queue.wanted + self._refusals.lately(self._clock.now_s()), self._settings):
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
            if self._signals.ladder.overloaded:
                give_up_lost(self._signals.in_flight, self._clock.now_s())
            self._free.add(self.pool.replicas)
            self.pool.changed()
            self.pool.read_all()
            self.queue.stand_back()
            self._schedule()
            self._recheck_later()


def _nothing() -> None:
    """Nobody wants to be told."""


def _internal_error(request_id: str) -> OverspillError:
    return OverspillError(f"internal error while choosing a replica; the log has the details under id {request_id}")
