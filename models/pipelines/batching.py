"""Who waits at a stage, and who is computed together next: pure bookkeeping, the caller brings the time.

Items wait in one line for each padding bucket, so that a short text is never padded to the length of a long one. The
item that goes first says which line is served. The order is by priority; within one by urgency, which is a deadline, or
else the time of arrival and some patience. A request of very many items stands in line as if they had come one batch
after the other: it takes its turn with others instead of holding them up.

A batch goes when it is full, when its oldest item has waited long enough, or when waiting on would cost the deadline of
one of its items, by what batches of that size took. Its size is the one that gives most answers in time for what it
takes: under load a batch of everybody would be late for all, and one for each that is nearly late would leave no time
for the others. Where items are padded to the longest among them, short and long ones are computed one after the other
if that takes less time than together.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

_PATIENCE_S = 1.0  # who has no deadline is as urgent as who has one of so long
_BATCH_APART_S = 0.05  # how much less urgent the items of each further batch of one request are
_GAIN = 0.2
_SLACK_SHARE = 0.75  # of what is left to the earliest deadline, that a batch may take: its answers have a way to go yet
_TRIED = 32  # sizes of a batch that are compared, or a few more
_WORTH_APART = 0.9  # of the time that all take together: what two batches may take, for fewer items to be padded
_SPREAD = 1.3  # of what batches took: a deadline is lost by one that takes longer than the mean


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How items are gathered into batches.

    Attributes:
        max_size: items computed together at most; 1 batches nothing.
        max_wait_ms: how long an item may wait for company while a worker is idle; 0 never waits: what came while all
            workers were busy is company enough.
        max_cost: bound on items times the size that they are padded to; 0 for none. What a batch takes of the memory.
        buckets: sizes that items are padded to, ascending; larger ones, and all without buckets, wait in one line.
        pads_to: what items are padded to: their bucket, or the longest of their batch, which buckets only bound.
    """

    max_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    max_cost: Annotated[int, msgspec.Meta(ge=0)] = 0
    buckets: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    pads_to: Literal["bucket", "longest"] = "bucket"

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets = {list(self.buckets)} must ascend without repetition")


class Waits(Protocol):
    """What is known of an item that waits.

    Attributes:
        cost: its size, in the unit of the buckets.
        rank: its place in its request, counted from 0.
        due_s: when its request is worth nothing any more; infinity without a deadline.
        over: nobody waits for it any more.
        size_bytes: what it takes of the memory.
    """

    cost: int
    size_bytes: int
    rank: int
    arrived_s: float

    @property
    def priority(self) -> int: ...

    @property
    def due_s(self) -> float: ...

    @property
    def over(self) -> bool: ...


I = TypeVar("I", bound=Waits)  # noqa: E741 - an item
_Key = tuple[int, float, int]
_Entry = tuple[_Key, I]


@dataclass(frozen=True, slots=True)
class Batch(Generic[I]):
    """Items to compute together.

    Attributes:
        size: what each is padded to.
    """

    items: tuple[I, ...]
    size: int

    @property
    def cost(self) -> int:
        return len(self.items) * self.size


@dataclass(slots=True)
class Pace:
    """How long batches take: an average for each class of cost, the powers of two.

    A class that was never seen is believed to cost as the root of its size beside the nearest one: that is how batches
    pay where they do, so that larger ones are tried; what they really take is known after the first.
    """

    _seen: dict[int, float] = field(default_factory=dict)

    def took(self, cost: int, seconds: float) -> None:
        known = self._seen.get(_class(cost))
        scaled = seconds * (1 << _class(cost)) / max(cost, 1)
        self._seen[_class(cost)] = scaled if known is None else known + _GAIN * (scaled - known)

    def expected_s(self, cost: int) -> float:
        """Return the time that a batch is expected to need, with some spread; 0 before any was seen."""
        if not self._seen:
            return 0.0
        wanted = _class(cost)
        nearest = min(self._seen, key=lambda known: abs(known - wanted))
        whole_s = self._seen[nearest] * math.pow(2.0, (wanted - nearest) / 2)
        return _SPREAD * whole_s * max(cost, 1) / (1 << wanted)


def _tried(count: int) -> list[int]:
    """Return the sizes of batches that are compared, the largest first: of many items not every one."""
    return [*range(count, 1, -max(1, count // _TRIED)), 1]


def _cost_of(entry: _Entry[I]) -> int:
    return entry[1].cost


def _batch(entries: Sequence[_Entry[I]], least: int) -> Batch[I]:
    return Batch(tuple(item for _, item in entries), max([least, *map(_cost_of, entries)]))


def _class(cost: int) -> int:
    """Return the power of two that holds a cost."""
    return max(cost - 1, 0).bit_length()


@dataclass(slots=True)
class Waiting(Generic[I]):
    """The items that wait at one stage.

    Attributes:
        size_bytes: what all of them take of the memory.
    """

    settings: BatchSettings
    pace: Pace = field(default_factory=Pace)
    _lines: dict[int, list[_Entry[I]]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _count: int = 0
    size_bytes: int = 0

    def __len__(self) -> int:
        """Count those that wait, some of whom nobody may wait for any more."""
        return self._count

    def add(self, item: I) -> None:
        urgent_s = item.due_s if item.due_s < math.inf else item.arrived_s + _PATIENCE_S
        urgent_s += (item.rank // self.settings.max_size) * _BATCH_APART_S
        key = (-item.priority, urgent_s, next(self._numbers))
        heapq.heappush(self._lines.setdefault(self._bucket(item.cost), []), (key, item))
        self._counted(item)

    def clear(self) -> list[I]:
        """Forget and return all."""
        items = [item for line in self._lines.values() for _, item in line]
        self._lines.clear()
        self._count = self.size_bytes = 0
        return items

    def take(self, now_s: float) -> Batch[I] | float:
        """Return the next batch, or how many seconds to wait for one; infinity: until somebody comes."""
        while (bucket := self._first_bucket()) is not None:
            line, least = self._lines[bucket], self._least_size(bucket)
            if gathered := self._gathered(line, least):
                return self._batch_of(gathered, line, least, now_s)
        return math.inf  # nobody came, or all have left since their line was looked at

    def _batch_of(self, gathered: list[_Entry[I]], line: list[_Entry[I]], least: int, now_s: float) -> Batch[I] | float:
        """Return what to compute now of the first of a line, or how many seconds to wait; the others stay in it."""
        chosen, later = self._in_time(gathered, least, now_s)
        self._give_back(later, line)
        full = len(chosen) >= self.settings.max_size or len(line) > 0
        wait_s = 0.0 if full else self._may_wait_until(_batch(chosen, least)) - now_s
        if wait_s > 0:
            self._give_back(chosen, line)
            return wait_s
        if least == 0:
            chosen, others = self._apart(chosen)
            self._give_back(others, line)
        return _batch(chosen, least)

    def _least_size(self, bucket: int) -> int:
        """Return what items of a line are padded to at least."""
        return 0 if self.settings.pads_to == "longest" else bucket

    def _give_back(self, entries: Sequence[_Entry[I]], line: list[_Entry[I]]) -> None:
        for entry in entries:
            heapq.heappush(line, entry)
            self._counted(entry[1])

    def _apart(self, chosen: list[_Entry[I]]) -> tuple[list[_Entry[I]], list[_Entry[I]]]:
        """Divide items by size where that is faster than padding all: those to compute now, and those right after.

        Who goes first is computed now. Nobody ends later by it than together, as far as is known of such batches.
        """
        by_size = sorted(chosen, key=_cost_of)
        count, largest = len(by_size), by_size[-1][1].cost
        best_s, best = _WORTH_APART * self.pace.expected_s(count * largest), 0
        for at in range(1, count):
            size = by_size[at - 1][1].cost
            if size == by_size[at][1].cost:
                continue
            took_s = self.pace.expected_s(at * size) + self.pace.expected_s((count - at) * largest)
            if took_s < best_s:
                best_s, best = took_s, at
        if best == 0:
            return chosen, []
        parts = by_size[:best], by_size[best:]
        first = 0 if chosen[0][1].cost <= parts[0][-1][1].cost else 1
        return sorted(parts[first]), parts[1 - first]

    def _may_wait_until(self, batch: Batch[I]) -> float:
        oldest_s = min(item.arrived_s for item in batch.items)
        needs_s = self.pace.expected_s(batch.cost + batch.size)
        lost_s = min(item.due_s for item in batch.items) - needs_s
        return min(oldest_s + self.settings.max_wait_ms / 1e3, lost_s)

    def _gathered(self, line: list[_Entry[I]], least: int) -> list[_Entry[I]]:
        """Take the first items of a line, as many as fit one batch, and at least one."""
        most, bound = self.settings.max_size, self.settings.max_cost or math.inf
        chosen: list[_Entry[I]] = []
        size = least
        while line and len(chosen) < most:
            item = line[0][1]
            if not item.over:
                size = max(size, item.cost)
                if chosen and (len(chosen) + 1) * size > bound:
                    break
                chosen.append(line[0])
            self._popped(line)
        return chosen

    def _in_time(self, chosen: list[_Entry[I]], least: int, now_s: float) -> tuple[list[_Entry[I]], list[_Entry[I]]]:
        """Divide items by how many to compute at once: as many as give most answers in time for what they take.

        Whoever is too late whatever the size counts for none; where that is everybody, all are computed at once.
        """
        dues_s = [item.due_s for _, item in chosen]
        if min(dues_s) == math.inf:
            return chosen, []
        sizes = list(itertools.accumulate((max(least, item.cost) for _, item in chosen), max))
        took_s = {n: self.pace.expected_s(n * sizes[n - 1]) for n in _tried(len(chosen))}
        for share in (_SLACK_SHARE, 1.0):
            best, best_rate = 0, 0.0
            for count, seconds in took_s.items():
                kept = sum(due_s >= now_s + seconds / share for due_s in dues_s[:count])
                if kept > best_rate * seconds:
                    best, best_rate = count, kept / seconds if seconds else math.inf
            if best:
                return chosen[:best], chosen[best:]
        return chosen, []

    def _first_bucket(self) -> int | None:
        """Return the line whose first item goes first, those dropped on the way that nobody waits for."""
        best: int | None = None
        for bucket, line in self._lines.items():
            while line and line[0][1].over:
                self._popped(line)
            if line and (best is None or line[0][0] < self._lines[best][0][0]):
                best = bucket
        return best

    def _counted(self, item: I) -> None:
        self._count += 1
        self.size_bytes += item.size_bytes

    def _popped(self, line: list[_Entry[I]]) -> None:
        self._count -= 1
        self.size_bytes -= heapq.heappop(line)[1].size_bytes

    def _bucket(self, cost: int) -> int:
        """Return what an item is padded to; 0 where no bucket holds it."""
        at = bisect_left(self.settings.buckets, cost)
        return self.settings.buckets[at] if at < len(self.settings.buckets) else 0
