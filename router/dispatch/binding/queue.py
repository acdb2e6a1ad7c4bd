"""Who waits, for which replicas, and who goes first at each.

An entry stands in the line of every replica that it waits for, under the rank that the policy gave it there. Ranks are
not kept up to date: when a slot is free, whoever stands first is decided again, and stands back where its new rank
belongs. So a completion costs a few decisions, however many wait. Places that are void are taken out at once: none are
left for a clean-up that would hold the event loop.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, Generic, TypeVar

from router.dispatch.assessment.pending import PendingRequest
from router.dispatch.records.record import DecisionRecord
from router.signals.in_flight import Attempt
from router.values.choice import Choice
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings

Key = tuple[bool, int, float, float]
"""Sorts entries: a begun answer first, then priority, then rank, then age."""

_LOOKS = 256  # entries looked at for one whose caller has more than its share of the places


class QueueEntry:
    """One request that waits for a replica; `bound` is fulfilled with its attempt there.

    Attributes:
        entered_s: when it came in, on the tier's clock.
        choice: the last decision, None before the first.
        promised, wait_factor: the first choice that it had to wait for, and `LatencyModel.wait_factor` then.
        waits_for: replica id → rank.
        places: where it stands, in which line; version: how often that was changed.
        moment: the moment of its last decision, see `Pool`.
        offered: the imagined tiers know of it.
        order: in which it entered the queue; tells equals apart, so that being decided again costs nobody their place.
        in_slack: it is served when nobody else is: no reason to step down, to scale, or to put its caller back.
    """

    def __init__(self, pending: PendingRequest, record: DecisionRecord, entered_s: float) -> None:
        self.pending = pending
        self.request: InferenceRequest = pending.request
        self.record = record
        self.entered_s = entered_s
        self.choice: Choice | None = None
        self.promised: Choice | None = None
        self.wait_factor = 1.0
        self.waits_for: Mapping[str, float] = {}
        self.places: list[tuple[_Line[Any], Any]] = []
        self.version = 0
        self.moment = -1
        self.offered = False
        self.order = 0
        self.bound: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        self.in_slack: bool = pending.request.objective.in_slack

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
    def target(self) -> str | None:
        """Where it would rather go; None where it waits for time to pass only."""
        return self.choice.candidate.info.replica_id if self.waits_for and self.choice is not None else None

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


_Ranked = tuple[bool, int, float, float, int, QueueEntry]
"""A place by `Key`."""
_Due = tuple[float, int, QueueEntry]
"""A place by time."""
_Place = TypeVar("_Place", _Ranked, _Due)


class _Line(Generic[_Place]):
    """Places in order: a sorted list. To shift some thousand pointers takes microseconds, and no void is kept.

    A place is what sorts it, the entry's order among equals, and the entry, which stands in a line once. It is flat: a
    search looks at a dozen of thousands, whose parts are in no cache.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: list[_Place] = []

    def add(self, place: _Place) -> None:
        insort(self.places, place)
        place[-1].places.append((self, place))

    def remove(self, place: _Place) -> None:
        places = self.places
        index = bisect_left(places, place)
        if index == len(places) or places[index][-1] is not place[-1]:  # a rank that is no number is in no order
            index = next(at for at, other in enumerate(places) if other[-1] is place[-1])
        del places[index]

    def first(self) -> _Place | None:
        """Return the first place of anybody who still waits."""
        for place in self.places:
            if not place[-1].bound.done():
                return place
        return None


class RequestQueue:
    """The tier's queue."""

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}
        self._lines: defaultdict[str, _Line[_Ranked]] = defaultdict(_Line)
        self._by_age: defaultdict[str, _Line[_Ranked]] = defaultdict(_Line)
        self._due: _Line[_Due] = _Line()
        self._order = count()
        self._waiting_by_priority: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._last_of_all: _Line[_Ranked] = _Line()
        self._last_sheddable: _Line[_Ranked] = _Line()
        self._sheddable = self._in_slack = 0
        self._aside: list[tuple[QueueEntry, int, Mapping[str, float], float]] = []
        self._callers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return iter([entry for entry in self._entries if not entry.bound.done()])

    @property
    def wanted(self) -> int:
        """How many wait, but for those in the slack of others."""
        return len(self._entries) - self._in_slack

    def enter(self, entry: QueueEntry) -> None:
        self._entries[entry] = None
        entry.order = next(self._order)
        self._sheddable += entry.sheddable
        self._in_slack += entry.in_slack
        self._callers[entry.request.caller] += 1

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry; one that is not in the queue is ignored."""
        if entry in self._entries:
            del self._entries[entry]
            self._sheddable -= entry.sheddable
            self._in_slack -= entry.in_slack
            caller = entry.request.caller
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
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
        order, priority = entry.order, entry.request.objective.priority
        for replica_id, rank in waits_for.items():
            self._lines[replica_id].add((*entry.key(rank), order, entry))
            if by_age:
                self._by_age[replica_id].add((*entry.age_key, order, entry))
            waiting = self._waiting_by_priority[replica_id]
            waiting[priority] = waiting.get(priority, 0) + 1
        last = (*entry.last_key(), -order, entry)  # of equals, the newest
        self._last_of_all.add(last)
        if entry.sheddable:
            self._last_sheddable.add(last)
        if look_again_s < math.inf:
            self._due.add((look_again_s, order, entry))

    def set_aside(self, entry: QueueEntry, look_again_s: float) -> None:
        """Let an entry stand in nobody's way until the next `stand_back`."""
        waits_for = entry.waits_for
        self.place(entry, {}, look_again_s)
        self._aside.append((entry, entry.version, waits_for, look_again_s))

    def stand_back(self) -> None:
        """Something changed: who was set aside stands where they stood, unless they were decided again meanwhile."""
        aside, self._aside = self._aside, []
        for entry, version, waits_for, look_again_s in aside:
            if entry.version == version and entry in self._entries:
                self.place(entry, waits_for, look_again_s)

    def first(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who stands first at a replica, with its key there; None if nobody waits for it."""
        return self._first(self._lines.get(replica_id))

    def oldest(self, replica_id: str) -> tuple[Key, QueueEntry] | None:
        """Return who of the highest priority has waited longest for a replica, of those placed `by_age`."""
        return self._first(self._by_age.get(replica_id))

    @staticmethod
    def _first(line: _Line[_Ranked] | None) -> tuple[Key, QueueEntry] | None:
        place = None if line is None else line.first()
        return None if place is None else (place[:4], place[-1])

    @property
    def stands(self) -> bool:
        """Whether anybody stands in any line."""
        return bool(self._last_of_all.places)

    def ahead(self, replica_id: str, priority: int) -> int:
        """Count who waits for a replica with that priority or a higher one."""
        waiting = self._waiting_by_priority.get(replica_id)
        if not waiting:
            return 0
        number = 0
        for level, there in waiting.items():
            if level >= priority:
                number += there
        return number

    def next_due_s(self) -> float:
        """When the next entry is to be decided again, infinity if none is."""
        place = self._due.first()
        return math.inf if place is None else place[0]

    def pop_due(self, now_s: float) -> QueueEntry | None:
        """Take the next entry whose time to be decided again has come."""
        place = self._due.first()
        if place is None or place[0] > now_s:
            return None
        entry = place[2]
        self._due.remove(place)
        entry.places.remove((self._due, place))
        return entry

    def crowded_out(self, settings: RouterSettings) -> QueueEntry | None:
        """Return the entry to refuse because a class is full: the last in order of that class, None if none is.

        That need not be the newcomer: it is the one of least priority, and among those of least rank. Where callers
        share, it is a caller's who has more than its share of the places, so that nobody is crowded out by one alone.
        """
        fair = settings.fairness.callers > 1.0 and len(self._callers) > 1
        if self._sheddable > settings.max_sheddable_queue:
            return self._last(self._last_sheddable, fair=fair)
        return self._last(self._last_of_all, fair=fair) if len(self._entries) > settings.max_queue else None

    def _last(self, line: _Line[_Ranked], *, fair: bool) -> QueueEntry | None:
        place = line.first()
        if place is None or not fair:
            return None if place is None else place[-1]
        last, share = place[-1], len(self._entries) / len(self._callers)
        for place in islice(line.places, _LOOKS):
            entry = place[-1]
            if entry.request.objective.priority != last.request.objective.priority:
                break
            if not entry.bound.done() and self._callers[entry.request.caller] > share:
                return entry
        return last

    def displace(self, entry: QueueEntry) -> None:
        """Take an entry out of where it waits; it stays in the queue."""
        entry.version += 1
        if not entry.places:
            return
        priority = entry.request.objective.priority
        for replica_id in entry.waits_for:
            waiting = self._waiting_by_priority[replica_id]
            waiting[priority] -= 1
            if not waiting[priority]:
                del waiting[priority]
        entry.waits_for = {}
        for line, place in entry.places:
            line.remove(place)
        entry.places.clear()
