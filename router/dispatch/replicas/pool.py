"""The replicas of a tier as its decisions see them: read again only where something changed.

A view stands until this tier sends to its device, or something ends there, and for a millisecond at most. So a burst of
decisions reads the devices that it uses, and each of the others once. Beyond `MANY` replicas a decision looks at a few
of each kind (`router.dispatch.replicas.peers`), and only those are read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from router.base.clock import Clock
from router.dispatch.records.record import Rejection, ReplicaLoad
from router.dispatch.replicas.kv_room import KvRoom
from router.dispatch.replicas.peers import CHOICES, PeerGroups
from router.dispatch.replicas.served import Part, Served, Sides, other_model
from router.dispatch.replicas.view import ReplicaView, relate
from router.signals.canary import CanaryState
from router.signals.signals import Signals
from router.values.replica import Replica, ReplicaSnapshot, Unreached, reach_of
from router.values.request import InferenceRequest, Locality
from router.values.settings import RouterSettings
from router.values.situation import Situation

log = structlog.get_logger("router")

MANY = 64
"""Replicas of a tier up to which each decision looks at all of them."""

# What nobody told of is seen after so long.
_MOMENT_S = 0.001
_READ_IN_TURN = 4  # devices read at each moment of a tier of many replicas, whoever is asked
_SESSIONS_KEPT = 4096


class Waiting(Protocol):
    """The tier's queue, as far as decisions look at it."""

    def __len__(self) -> int:
        """Count the requests that wait."""
        ...

    @property
    def stands(self) -> bool:
        """Whether anybody stands in any line."""
        ...

    def ahead(self, replica_id: str, priority: int) -> int:
        """Count who waits for a replica with that priority or a higher one."""
        ...


class Pool:
    """All replicas of a tier. `look` before reading it.

    Attributes:
        views: by replica id.
        ahead: see `Waiting`.
        session_replica: session → the replica that served it last.
        loads: every replica as the last look found it, for decision records.
        now_s: of the last look; waiting: requests in the queue then.
        moment: counts the looks that found anything changed: decisions of one moment have seen the same.
        locality: what the tier's policy allows at all.
        kv: for whom room in KV caches is kept.
        many: decisions look at a few of each kind of replica.
        sources: asked at each look for those that were never reached; unreached: their last answer.
    """

    def __init__(
        self, settings: RouterSettings, signals: Signals, clock: Clock, queue: Waiting, seed: int | None = None
    ) -> None:
        self.settings = settings
        self.signals = signals
        self.replicas: dict[str, Replica] = {}
        self.views: dict[str, ReplicaView] = {}
        self.many = False
        self.session_replica: OrderedDict[str, str] = OrderedDict()
        self.loads: tuple[ReplicaLoad, ...] = ()
        self.now_s = -math.inf
        self.waiting = 0
        self.moment = 0
        self.locality = Locality.ANY
        self.sources: Callable[[], Sequence[Unreached]] = tuple
        self.unreached: Sequence[Unreached] = ()
        self.kv: KvRoom[Any] = KvRoom()
        self._clock = clock
        self._queue = queue
        self._devices: dict[str, list[str]] = {}
        self._beside: dict[str, dict[str, None]] = {}  # devices that share what is known of them: an upstream's
        self._stale: dict[str, None] = {}
        self._all_stale = True
        self._all_read_s = -math.inf
        self._served: dict[str, Served] = {}
        self._families: dict[str, str] = {}
        self._unreadable: set[str] = set()
        self._favoured = -1
        self._peers = PeerGroups(seed)
        self._epoch = 0
        self._read_in: dict[str, int] = {}  # the epoch in which a device was read last
        self._turns: list[str] = []

    def set_replicas(self, replicas: dict[str, Replica]) -> None:
        self.replicas = replicas
        self.views = {}
        self._served.clear()
        self._families.clear()
        self._devices, self._beside = {}, {}
        shared: dict[str, dict[str, None]] = {}
        for name, replica in replicas.items():
            info, device = replica.info, replica.info.device_key
            self._devices.setdefault(device, []).append(name)
            self._beside[device] = shared.setdefault(info.endpoint if info.remote else device, {})
            self._beside[device][device] = None
        self.many = len(replicas) > MANY
        self.signals.affinity.finds = self.many
        self._read_in.clear()
        self._turns = list(self._devices)
        self._find_peers()
        self.changed()

    def load(self, asker: str = "") -> list[ReplicaSnapshot]:
        """Return a snapshot of every replica as it is now, but of those that lead back to the tier `asker`."""
        seen = self.replicas.values()
        return [replica.snapshot() for replica in seen if not asker or asker not in reach_of(replica)]

    def _find_peers(self) -> None:
        """Group the replicas of a tier that has many, those of each deployment of a canary for themselves."""
        canaries = list(self.signals.canaries)
        infos = [replica.info for replica in self.replicas.values()] if self.many else []
        self._peers.group(infos, lambda info: tuple([canary.side_at(info) for canary in canaries]))

    def line(self, replica_id: str) -> str:
        """Return the name of the line in which requests wait for a replica: its own, or that of all its peers."""
        return self._peers.line(replica_id) if self.many else replica_id

    def lines(self, waits_for: Mapping[str, float]) -> Mapping[str, float]:
        """Return the lines that a request stands in who waits for replicas, with its highest rank in each."""
        return self._peers.lines(waits_for) if self.many else waits_for

    @property
    def lined_up(self) -> bool:
        """Whether anybody stands in any line: else nobody is `ahead` of anybody."""
        return self._queue.stands

    def ahead(self, replica_id: str, priority: int) -> int:
        """Count who goes first at a replica, of that priority or a higher one: its part, where peers share a line."""
        if not self.many:
            return self._queue.ahead(replica_id, priority)
        return self._queue.ahead(self.line(replica_id), priority) // self._peers.number(replica_id)

    def to_look_at(self, part: Part, request: InferenceRequest, without: Collection[str]) -> Sequence[str]:
        """Return which of the replicas that may serve a request a decision looks at, read as they are now.

        All of few. Of many: two of each kind, where that many may be asked, and those that know the request's session
        or the beginning of its prompt.
        """
        if not self.many:
            return part.names
        if not part.kinds:
            for name in part.names:
                self._see(name)
            return part.names
        found: dict[str, None] = {}
        for peers in part.kinds:
            usable = 0
            for name in peers.draw(self._peers.chance, without):
                view = self._see(name)
                found[name] = None
                usable += not view.blocked
                if usable >= CHOICES:
                    break
        found.update(dict.fromkeys(name for name in without if self._peers.of(name) in part.kinds))
        session = request.objective.session
        known = [self.signals.affinity.holder(request)]
        known.append(None if session is None else self.session_replica.get(session))
        for holder in known:
            if holder is not None and holder not in found and self._peers.of(holder) in part.kinds:
                self._see(holder)
                found[holder] = None
        return list(found)

    def _see(self, name: str) -> ReplicaView:
        """Return the view of a replica, read in this moment."""
        device = self.replicas[name].info.device_key
        if self._read_in.get(device) != self._epoch:
            self._look_at(device)
        return self.views[name]

    @property
    def devices(self) -> int:
        """Count the devices."""
        return len(self._devices)

    def on_device(self, device: str) -> Sequence[str]:
        """Return the ids of a device's replicas."""
        return self._devices.get(device, ())

    def changed(self, device: str | None = None) -> None:
        """Something about a device has changed, or anything at all: the next look reads that anew."""
        if device is None:
            self._all_stale = True
        elif self.many:
            self._stale[device] = None
        else:
            self._stale.update(self._beside.get(device, {}))

    def begin_moment(self) -> None:
        """Read everything at the next look, unless that has only just been done."""
        if self._clock.now_s() - self._all_read_s > _MOMENT_S:
            self._all_stale = True

    def look(self) -> Pool:
        """Bring it up to date."""
        if not self._all_stale and not self._stale:
            return self
        self.moment += 1
        self.now_s = now_s = self._clock.now_s()
        self.waiting = len(self._queue)
        self.unreached = self.sources()
        devices: Iterable[str] = self._stale
        if self._all_stale:
            devices, self._all_read_s = self._begin_epoch(), now_s
        fresh = False
        for device in devices:
            fresh = self._look_at(device) or fresh
        what_if = self.signals.what_if
        if self._favoured != what_if.version:
            self._favoured = what_if.version
            for name, view in self.views.items():
                view.favoured = what_if.favours(view.info.device_key, view.info.family, name)
        if fresh and not self.many:
            self.loads = tuple([view.load for view in self.views.values()])
        self._all_stale = False
        self._stale.clear()
        return self

    def _begin_epoch(self) -> Iterable[str]:
        """Return the devices to be read at once; the others are read when somebody looks at them."""
        if not self.many or not self.views:
            return self._devices
        self._epoch += 1
        turn, self._turns = self._turns[:_READ_IN_TURN], self._turns[_READ_IN_TURN:] or list(self._devices)
        return [*self._stale, *turn]

    def read_all(self) -> None:
        """Read every replica, also of many."""
        self.look()
        for device in self._devices:
            if self._read_in.get(device) != self._epoch:
                self._look_at(device)

    def loads_of(self, situation: Situation | None, rejections: Sequence[Rejection]) -> tuple[ReplicaLoad, ...]:
        """Return the loads that a decision saw: all, or of many those that it looked at."""
        if not self.many:
            return self.loads
        infos = [candidate.info for candidate in situation.candidates] if situation is not None else []
        infos += [rejection.info for rejection in rejections]
        return tuple([self.views[info.replica_id].load for info in infos if info.replica_id in self.views])

    def _read(self, name: str) -> bool:
        """Read a replica; returns whether its view is a new one. One that cannot be read is unavailable."""
        replica, signals, seen = self.replicas[name], self.signals, self.views.get(name)
        mine = signals.in_flight.at(name)
        try:
            snapshot, link = replica.snapshot(), replica.link
        except Exception:
            if name not in self._unreadable:  # once, not at every decision
                log.exception("load unreadable", replica=name)
            self._unreadable.add(name)
            why = "its load cannot be read"
            snapshot, link = ReplicaSnapshot(replica.info, available=False, slots=0, why=why), None
        else:
            self._unreadable.discard(name)
        health = signals.health.of(snapshot)
        if snapshot.credits is not None:  # a request that is bound spends its credit when it is sent, which is soon
            left = max(0, snapshot.credits - signals.in_flight.unopened_at(snapshot.info.endpoint))
            snapshot = msgspec.structs.replace(snapshot, credits=left)
        told: object = snapshot  # by its type mypyc would take `==` for `is`
        if seen is not None and seen.mine is mine and seen.link is link and seen.snapshot == told:
            seen.meets(health)
            return False
        if seen is None or seen.info is not snapshot.info:
            self._served.clear()
            self._families.clear()
            self._favoured = -1
            if self.many and seen is not None:
                self._find_peers()
        view = ReplicaView(replica, snapshot, link, health, mine)
        if seen is not None:
            view.favoured = seen.favoured
        self.views[name] = view
        return True

    def _look_at(self, device: str) -> bool:
        """Read the replicas of a device; returns whether any view of them is a new one."""
        names, views, peaks, fresh = self.on_device(device), self.views, self.signals.peaks, False
        self._read_in[device] = self._epoch
        for name in names:
            fresh = self._read(name) or fresh
            views[name].peak_latency_s = peaks.of(name)
        if fresh:
            relate([views[name] for name in names])
        if self.many:
            for name in names:
                view = views[name]
                self._peers.seen(name, usable=not view.blocked, room=view.room)
        return fresh

    def remember_session(self, session: str | None, replica_id: str) -> None:
        if session is not None:
            self.session_replica[session] = replica_id
            self.session_replica.move_to_end(session)
            if len(self.session_replica) > _SESSIONS_KEPT:
                self.session_replica.popitem(last=False)

    def by_credits(self, replica_id: str) -> bool:
        """Whether credits say what may be sent there: a wait for one says nothing of slots."""
        return self.look().views[replica_id].snapshot.credits is not None

    def _part(self, names: Sequence[str]) -> Part:
        if len(names) <= MANY:
            return Part(tuple(names))
        return Part(tuple(names), self._peers.kinds(names))

    def redraw(self) -> None:
        """Canaries have changed: who serves which request is found anew."""
        self._served.clear()
        self._find_peers()
        self.changed()

    def canary_of(self, request: InferenceRequest) -> CanaryState | None:
        """Return the canary that a request meets, None where there is none."""
        served = self._served.get(request.model)
        canary = None if served is None else served.canary
        return None if canary is None else canary.state(request)

    def has_room(self, replica_id: str) -> bool:
        """Whether a request that is sent to a replica now would start at once."""
        view = self.views.get(replica_id)
        return view is not None and not view.blocked and view.room

    def family(self, model: str) -> str:
        """Return the family of a model's name; names that nobody serves share one, since anybody may ask for any."""
        found = self._families.get(model)
        if found is None:
            for replica in self.replicas.values():
                if model in (replica.info.family, replica.info.variant):
                    found = self._families[model] = replica.info.family
                    break
        return found or ""

    def served(self, model: str) -> Served | None:
        """Return who serves a model, None where nobody does."""
        found = self._served.get(model)
        if found is None:
            infos = [view.info for view in self.views.values()]
            serving = [info for info in infos if model in (info.family, info.variant)]
            if not serving:  # anybody may ask for any name: those are not kept
                return None
            others = [info for info in infos if model not in (info.family, info.variant)]
            canary, sides = self.signals.canaries.split(serving) or (None, {})
            names = [info.replica_id for info in serving]
            of_side = {
                side: (
                    self._part([name for name in names if name not in sides[side.other]]),
                    self._part(sorted(sides[side.other])),
                )
                for side in sides
            }
            found = self._served[model] = Served(
                self._part(names),
                tuple([other_model(info, model) for info in others]) if len(others) <= MANY else (),
                Sides(
                    best_quality=max(info.quality for info in serving),
                    pinned=all(model != info.family for info in serving),
                    remote_served=any(info.remote for info in serving),
                ),
                min(info.context_tokens for info in serving),
                min(info.quality for info in serving),
                canary,
                of_side,
            )
        return found
