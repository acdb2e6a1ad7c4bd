"""The replicas of a tier as its decisions see them: read again only where something changed.

A view stands until this tier sends to its device, or something ends there, and for a millisecond at most. So a burst of
decisions reads the devices that it uses, and each of the others once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from router.base.clock import Clock
from router.dispatch.kv_room import KvRoom
from router.dispatch.record import Rejection, ReplicaLoad
from router.signals.health import Health
from router.signals.occupancy import occupied_slots, sibling_load
from router.signals.replica_state import ReplicaState
from router.signals.signals import Signals
from router.values.link import LinkSnapshot
from router.values.prediction import InFlightLoad, SiblingLoad
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot
from router.values.request import Locality
from router.values.settings import RouterSettings

log = structlog.get_logger("router")

# What nobody told of is seen after so long.
_MOMENT_S = 0.001
_SESSIONS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Unreached:
    """A configured upstream that was never reached: what it serves is not known yet.

    Attributes:
        why: what the last attempt met.
    """

    endpoint: str
    why: str

    @property
    def text(self) -> str:
        return f"not reached yet, so what it serves is not known; {self.why}"


class ReplicaView(msgspec.Struct, gc=False):
    """One replica as it stands now, shared by the decisions of one moment.

    Attributes:
        mine: what this tier has sent there.
        own: its sequences.
        load: for the decision record.
        blocked: it is not available, or its health speaks against some requests.
        metered: bytes on its link cost money.
        as_sibling: its load as the other rungs of its device meet it, None where it has no sequences.
        siblings: the other rungs of its device that have sequences.
        occupied, slots: of its device.
        room: a slot is free, its own and its device's.
        kv_room: tokens for which its KV cache has room; None where it does not tell, or none would be made by waiting.
        favoured, peak_latency_s: as in `Candidate`.
        state: what predictions on it have in common, None before the first.
    """

    replica: Replica
    info: ReplicaInfo
    snapshot: ReplicaSnapshot
    link: LinkSnapshot | None
    health: Health
    mine: InFlightLoad
    own: int
    load: ReplicaLoad
    blocked: bool
    metered: bool
    as_sibling: SiblingLoad | None = None
    siblings: tuple[SiblingLoad, ...] = ()
    occupied: int = 0
    slots: int = 0
    room: bool = False
    kv_room: int | None = None
    favoured: bool = True
    peak_latency_s: float = 0.0
    state: ReplicaState | None = None


class Sides(msgspec.Struct, frozen=True, gc=False):
    """What is said of all replicas that may ever serve a request, as in `Situation`."""

    best_quality: float
    pinned: bool
    remote_served: bool
    only_remote_fits: bool = False
    local_down: bool = False
    remote_down: bool = False


class Served(msgspec.Struct, frozen=True, gc=False):
    """Which replicas serve a model.

    Attributes:
        others: the rejections of all other replicas.
        sides: for a request that all of them may serve now.
        least_context_tokens, least_quality: of any of them.
    """

    names: tuple[str, ...]
    others: tuple[Rejection, ...]
    sides: Sides
    least_context_tokens: int
    least_quality: float


class Waiting(Protocol):
    """The tier's queue, as far as decisions look at it."""

    def __len__(self) -> int:
        """Count the requests that wait."""
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
        upstream: asked at each look for what is configured and was never reached; unreached: its last answer.
    """

    def __init__(self, settings: RouterSettings, signals: Signals, clock: Clock, queue: Waiting) -> None:
        self.settings = settings
        self.signals = signals
        self.replicas: dict[str, Replica] = {}
        self.views: dict[str, ReplicaView] = {}
        self.ahead = queue.ahead
        self.session_replica: OrderedDict[str, str] = OrderedDict()
        self.loads: tuple[ReplicaLoad, ...] = ()
        self.now_s = -math.inf
        self.waiting = 0
        self.moment = 0
        self.locality = Locality.ANY
        self.upstream: Callable[[], Unreached | None] = _nothing
        self.unreached: Unreached | None = None
        self.kv = KvRoom()
        self._clock = clock
        self._queue = queue
        self._devices: dict[str, list[str]] = {}
        self._beside: dict[str, dict[str, None]] = {}  # devices that share what is known of them: an upstream's
        self._stale: dict[str, None] = {}
        self._all_stale = True
        self._all_read_s = -math.inf
        self._served: dict[str, Served] = {}
        self._unreadable: set[str] = set()
        self._favoured = -1

    def set_replicas(self, replicas: dict[str, Replica]) -> None:
        self.replicas = replicas
        self.views = {}
        self._devices, self._beside = {}, {}
        shared: dict[str, dict[str, None]] = {}
        for name, replica in replicas.items():
            info, device = replica.info, replica.info.device_key
            self._devices.setdefault(device, []).append(name)
            self._beside[device] = shared.setdefault(info.endpoint if info.remote else device, {})
            self._beside[device][device] = None
        self.changed()

    def on_device(self, device: str) -> Sequence[str]:
        """Return the ids of a device's replicas."""
        return self._devices.get(device, ())

    def changed(self, device: str | None = None) -> None:
        """Something about a device has changed, or anything at all: the next look reads that anew."""
        if device is None:
            self._all_stale = True
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
        self.unreached = self.upstream()
        devices: Iterable[str] = self._stale
        if self._all_stale:
            devices, self._all_read_s = self._devices, now_s
        fresh = False
        for device in devices:
            fresh = self._look_at(device) or fresh
        what_if = self.signals.what_if
        if self._favoured != what_if.version:
            self._favoured = what_if.version
            for name, view in self.views.items():
                view.favoured = what_if.favours(view.info.device_key, view.info.family, name)
        if fresh:
            self.loads = tuple([view.load for view in self.views.values()])
        self._all_stale = False
        self._stale.clear()
        return self

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
        blocked = bool(health.code) or not snapshot.available
        if seen is not None and seen.mine is mine and seen.link is link and seen.snapshot == snapshot:
            seen.health, seen.blocked = health, blocked
            return False
        if seen is None or seen.info is not snapshot.info:
            self._served.clear()
            self._favoured = -1
        own = occupied_slots(snapshot, mine)
        metered = link is not None and link.price_per_byte > 0.0
        view = ReplicaView(
            replica, snapshot.info, snapshot, link, health, mine, own, (snapshot, link), blocked, metered
        )
        if seen is not None:
            view.favoured = seen.favoured
        if own and snapshot.kv_free_tokens is not None and snapshot.credits is None:
            view.kv_room = snapshot.kv_free_tokens - mine.unopened_prefill_tokens
        self.views[name] = view
        return True

    def _look_at(self, device: str) -> bool:
        """Read the replicas of a device; returns whether any view of them is a new one."""
        names, views, peaks, fresh = self.on_device(device), self.views, self.signals.peaks, False
        for name in names:
            fresh = self._read(name) or fresh
            views[name].peak_latency_s = peaks.of(name)
        if fresh:
            _relate([views[name] for name in names])
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

    def has_room(self, replica_id: str) -> bool:
        """Whether a request that is sent to a replica now would start at once."""
        view = self.views.get(replica_id)
        return view is not None and not view.blocked and view.room

    def served(self, model: str) -> Served | None:
        """Return who serves a model, None where nobody does."""
        found = self._served.get(model)
        if found is None:
            infos = [view.info for view in self.views.values()]
            serving = [info for info in infos if model in (info.family, info.variant)]
            if not serving:  # anybody may ask for any name: those are not kept
                return None
            others = [info for info in infos if model not in (info.family, info.variant)]
            found = self._served[model] = Served(
                tuple([info.replica_id for info in serving]),
                tuple([other_model(info, model) for info in others]),
                Sides(
                    best_quality=max(info.quality for info in serving),
                    pinned=all(model != info.family for info in serving),
                    remote_served=any(info.remote for info in serving),
                ),
                least_context_tokens=min(info.context_tokens for info in serving),
                least_quality=min(info.quality for info in serving),
            )
        return found


def _relate(views: Sequence[ReplicaView]) -> None:
    """Say how the views of one device stand to one another."""
    busy: list[SiblingLoad] = []
    if len(views) > 1:
        for view in views:
            if view.own and view.as_sibling is None:
                view.as_sibling = sibling_load(view.snapshot, view.mine)
            if view.as_sibling is not None:
                busy.append(view.as_sibling)
    for view in views:
        siblings = tuple([load for load in busy if load is not view.as_sibling]) if busy else ()
        if siblings != view.siblings:
            view.siblings, view.state = siblings, None
        snapshot, occupied = view.snapshot, view.own
        slots = own_slots = snapshot.slots
        for sibling in siblings:
            occupied += sibling.occupied
            slots = max(slots, sibling.slots)
        view.occupied, view.slots = occupied, slots
        credits_left = snapshot.credits  # they count what waits there, and what others send
        view.room = view.own < own_slots and occupied < slots if credits_left is None else credits_left > 0


def other_model(info: ReplicaInfo, model: str) -> Rejection:
    """Return the rejection of a replica that serves another model than the one asked for."""
    return Rejection(info, "other-model", f"serves {info.variant}, asked for {model}")


def _nothing() -> None:
    """There is no upstream that was not reached."""
