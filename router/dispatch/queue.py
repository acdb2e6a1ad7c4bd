"""Who waits, for which replicas, and who goes first at each: ordered heaps that are put right lazily.

An entry stands in the heap of every replica that it waits for, under the rank that the policy gave it there. Ranks are
not kept up to date: when a slot is free, whoever stands first is decided again, and stands back where its new rank
belongs. So a completion costs a few decisions, however many wait.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from router.dispatch.candidates import PendingRequest
from router.dispatch.record import DecisionRecord
from router.signals.in_flight import Attempt
from router.values.choice import Choice
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings

Key = tuple[bool, int, float, float]
"""Sorts entries: a begun answer first, then priority, then rank, then age."""

_SWEEP_ABOVE = 64


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request that waits for a replica; `bound` is fulfilled with its attempt there.

    Attributes:
        entered_s: when it came in, on the tier's clock.
        choice: the last decision, None before the first.
        promised, wait_factor: the first choice that it had to wait for, and `LatencyModel.wait_factor` then.
        version: of its places in the heaps; older ones are void.
        waits_for: replica id → rank, as of that version.
        moment: the moment of its last decision, see `Binder`.
        offered: the prices of capacity know of it.
        order: in which it entered the queue; tells equals apart, so that being decided again costs nobody their place.
    """

    pending: PendingRequest
    record: DecisionRecord
    entered_s: float
    choice: Choice | None = None
    promised: Choice | None = None
    wait_factor: float = 1.0
    version: int = 0
    waits_for: Mapping[str, float] = field(default_factory=dict)
    moment: int = -1
    offered: bool = False
    order: int = 0
    bound: asyncio.Future[Attempt] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def request(self) -> InferenceRequest:
        return self.pending.request

    @property
    def continuing(self) -> bool:
        """Whether its answer has begun; such a request goes before all others."""
        return self.request.continuation_tokens > 0

    @property
    def sheddable(self) -> bool:
        """Whether it counts in the class of requests that are turned away first."""
        return self.request.objective.priority < 0 and not self.continuing

    @property
    def takes_a_slot(self) -> bool:
        """Whether its last decision found a free slot for it."""
        return self.choice is not None and self.choice.starts

    def takes(self, replica_id: str) -> bool:
        """Whether its last decision found a free slot for it there."""
        return self.takes_a_slot and self.choice is not None and self.choice.candidate.info.replica_id == replica_id

    @property
    def leaves_slots(self) -> bool:
        """Whether its last decision leaves what is free to those behind it."""
        return self.choice is not None and self.choice.not_now

    @property
    def age_key(self) -> Key:
        """Sorts by age, before every rank of the same priority."""
        return self.key(math.inf)

    def own_key(self) -> Key:
        """Its key at the rank of its last decision."""
        return self.key(0.0 if self.choice is None else self.choice.rank)

    def last_key(self) -> Key:
        """Sorts the other way round: who is turned away first."""
        rank = max(self.waits_for.values(), default=-math.inf)
        return (self.continuing, self.request.objective.priority, rank, -self.request.accepted_at_s)

    def key(self, rank: float) -> Key:
        request = self.request
        return (not self.continuing, -request.objective.priority, -rank, request.accepted_at_s)


_Item = tuple[Key, int, int, QueueEntry]
_Due = tuple[float, int, int, QueueEntry]
_P = TypeVar("_P", _Item, _Due)


class RequestQueue:
    """The tier's queue."""

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}
        self._heaps: dict[str, list[_Item]] = {}
        self._by_age: dict[str, list[_Item]] = {}
        self._due: list[_Due] = []
        self._order = count()
        self._waiting_by_priority: dict[str, Counter[int]] = {}
        self._last_of_all: list[_Item] = []
        self._last_sheddable: list[_Item] = []
        self._sheddable = 0
        self._aside: list[tuple[QueueEntry, int, Mapping[str, float], float]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter([entry for entry in self._entries if not entry.bound.done()])

    def enter(self, entry: QueueEntry) -> None:
        self._entries[entry] = None
        entry.order = next(self._order)
        self._sheddable += entry.sheddable

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry; one that is not in the queue is ignored."""
        if entry in self._entries:
            del self._entries[entry]
            self._sheddable -= entry.sheddable
        self.displace(entry)

    def place(
        self, entry: QueueEntry, waits_for: Mapping[str, float], look_again_s: float, *, by_age: bool = False
    ) -> None:
        """Let an entry wait for replicas, and take it out of where it waited before.

        Args:
            waits_for: replica id → rank there; empty: it waits for time to pass only.
            look_again_s: when it is to be decided again at the latest, on the tier's clock; infinity for never.
            by_age: it may be the `oldest` there.
        """
        self.displace(entry)
        entry.waits_for = waits_for
        version, order, priority = entry.version, entry.order, entry.request.objective.priority
        for replica_id, rank in waits_for.items():
            self._push(self._heaps.setdefault(replica_id, []), (entry.key(rank), order, version, entry))
            if by_age:
                self._push(self._by_age.setdefault(replica_id, []), (entry.age_key, order, version, entry))
            self._waiting_by_priority.setdefault(replica_id, Counter())[priority] += 1
        last = (entry.last_key(), -order, version, entry)  # of equals, the newest
        for heap in (self._last_of_all, self._last_sheddable) if entry.sheddable else (self._last_of_all,):
            self._push(heap, last)
        if look_again_s < math.inf:
            self._push(self._due, (look_again_s, order, version, entry))

    def set_aside(self, entry: QueueEntry, look_again_s: float) -> None:
        """Let an entry stand in nobody's way until the next `stand_back`."""
        waits_for = entry.waits_for
        self.place(entry, {}, look_again_s)
        self._aside.append((entry, entry.version, waits_for, look_again_s))

    def stand_back(self) -> None:
        """Something changed: who was set aside stands where they stood, unless they were decided again meanwhile."""
        aside, self._aside = self._aside, []
        for entry, version, waits_for, look_again_s in aside:
            if entry.version == version:
                self.place(entry, waits_for, look_again_s)

    def first(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who stands first at a replica, with its key there; None if nobody waits for it."""
        return self._top(self._heaps.get(replica_id))

    def oldest(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who of the highest priority has waited longest for a replica, of those placed `by_age`."""
        return self._top(self._by_age.get(replica_id))

    def _push(self, heap: list[_P], place: _P) -> None:
        heapq.heappush(heap, place)
        if len(heap) > _SWEEP_ABOVE + 2 * len(self._entries):
            _sweep(heap)

    @staticmethod
    def _top(heap: list[_Item] | None) -> tuple[Key, QueueEntry] | None:
        while heap:
            key, _, version, entry = heap[0]
            if entry.version == version and not entry.bound.done():
                return key, entry
            heapq.heappop(heap)
        return None

    def ahead(self, replica_id: str, priority: int) -> int:
        """Count who waits for a replica with that priority or a higher one."""
        waiting = self._waiting_by_priority.get(replica_id)
        return sum(number for level, number in waiting.items() if level >= priority) if waiting else 0

    def next_due_s(self) -> float:
        """When the next entry is to be decided again, infinity if none is."""
        while self._due:
            due_s, _, version, entry = self._due[0]
            if entry.version == version and not entry.bound.done():
                return due_s
            heapq.heappop(self._due)
        return math.inf

    def pop_due(self, now_s: float) -> QueueEntry | None:
        """Take the next entry whose time to be decided again has come."""
        if self.next_due_s() > now_s:
            return None
        return heapq.heappop(self._due)[3]

    def crowded_out(self, settings: RouterSettings) -> QueueEntry | None:
        """Return the entry to refuse because a class is full: the last in order of that class, None if none is.

        That need not be the newcomer: it is the one of least priority, and among those of least rank.
        """
        if self._sheddable > settings.max_sheddable_queue:
            return self._last(self._last_sheddable)
        return self._last(self._last_of_all) if len(self._entries) > settings.max_queue else None

    @staticmethod
    def _last(heap: list[_Item]) -> QueueEntry | None:
        while heap:
            _, _, version, entry = heap[0]
            if entry.version == version and not entry.bound.done():
                return entry
            heapq.heappop(heap)
        return None

    def displace(self, entry: QueueEntry) -> None:
        """Take an entry out of where it waits; it stays in the queue."""
        priority = entry.request.objective.priority
        for replica_id in entry.waits_for:
            waiting = self._waiting_by_priority[replica_id]
            waiting[priority] -= 1
            if not waiting[priority]:
                del waiting[priority]
        entry.version += 1
        entry.waits_for = {}


def _sweep(heap: list[_P]) -> None:
    """Drop the places that are void."""
    heap[:] = [place for place in heap if place[3].version == place[2] and not place[3].bound.done()]
    heapq.heapify(heap)
