"""Who waits at a stage, and who is computed together next: pure bookkeeping, the caller brings the time.

Items wait in one line for each padding bucket, so that a short text is never padded to the length of a long one
(`lines.py`). The item that goes first says which line is served. The order is by priority; within one by urgency, which
is a deadline, or else the time of arrival and some patience. A request of very many items takes its turn with others.

A batch goes when it is full, when its oldest item has waited long enough, or when waiting on would cost the deadline of
one of its items, by what batches of that size took. Its size is the one that gives most answers in time for what it
takes: under load a batch of everybody would be late for all, and one for each that is nearly late would leave no time
for the others. One that would take long is no larger than it pays: whoever comes while it is computed waits for its
end. Where items are padded to the longest among them, short and long ones are computed one after the other if that
takes less time than together; where padding is not computed, nobody gains by that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, Literal

import msgspec

from models.pipelines.lines import I, Line, Lines

_GAIN = 0.2
_SLACK_SHARE = 0.75  # of what is left to the earliest deadline, that a batch may take: its answers have a way to go yet
_TRIED = 32  # sizes of a batch that are compared, or a few more
_WORTH_APART = 0.9  # of the time that all take together: what two batches may take, for fewer items to be padded
_SPREAD = 1.3  # of what batches took: a deadline is lost by one that takes longer than the mean
_PAYS = 0.9  # of the speed of a larger batch: what a smaller one has to have to be preferred to one that takes long
LONG_S = 0.1
"""A batch that takes longer keeps others waiting: it is divided where that costs little."""


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How items are gathered into batches.

    Attributes:
        max_size: items computed together at most; 1 batches nothing.
        max_wait_ms: how long an item may wait for company while a worker is idle; 0 never waits: what came while all
            workers were busy is company enough.
        max_cost: bound on items times the size that they are padded to; 0 for none. What a batch takes of the memory.
        buckets: sizes that items are padded to, ascending; larger ones, and all without buckets, wait in one line.
        pads_to: what items are padded to: their bucket, or the longest of their batch, which buckets only bound; or
            nothing, where what computes them pays for padding in memory alone.
    """

    max_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 0.0
    max_cost: Annotated[int, msgspec.Meta(ge=0)] = 0
    buckets: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] = ()
    pads_to: Literal["bucket", "longest", "nothing"] = "bucket"

    def __post_init__(self) -> None:
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets = {list(self.buckets)} must ascend without repetition")


@dataclass(frozen=True, slots=True)
class Batch(Generic[I]):
    """Items to compute together.

    Attributes:
        size: what each is padded to; None where padding is not computed.
    """

    items: tuple[I, ...]
    size: int | None

    @property
    def cost(self) -> int:
        return sum(map(_cost_of, self.items)) if self.size is None else len(self.items) * self.size


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
        whole_s = self._seen.get(wanted)
        if whole_s is None:
            nearest = min(self._seen, key=lambda known: abs(known - wanted))
            whole_s = self._seen[nearest] * math.pow(2.0, (wanted - nearest) / 2)
        return _SPREAD * whole_s * max(cost, 1) / (1 << wanted)


def _tried(count: int) -> list[int]:
    """Return the sizes of batches that are compared, the largest first: of many items not every one."""
    return [*range(count, 1, -max(1, count // _TRIED)), 1]


def _cost_of(item: I) -> int:
    return item.cost


def _batch(items: Sequence[I], least: int | None) -> Batch[I]:
    return Batch(tuple(items), None if least is None else max([least, *map(_cost_of, items)]))


def _costs(items: Sequence[I], least: int | None) -> dict[int, int]:
    """Return what the first so many of some items cost together, the most first."""
    if least is None:
        costs = list(itertools.accumulate(map(_cost_of, items)))
        return {count: costs[count - 1] for count in _tried(len(items))}
    sizes = list(itertools.accumulate((max(least, item.cost) for item in items), max))
    return {count: count * sizes[count - 1] for count in _tried(len(items))}


def _class(cost: int) -> int:
    """Return the power of two that holds a cost."""
    return max(cost - 1, 0).bit_length()


class Waiting(Generic[I]):
    """The items that wait at one stage."""

    def __init__(self, settings: BatchSettings) -> None:
        self.settings = settings
        self.pace = Pace()
        self._lines: Lines[I] = Lines(settings.buckets)

    def __len__(self) -> int:
        """Count those that wait, some of whom nobody may wait for any more."""
        return len(self._lines)

    @property
    def size_bytes(self) -> int:
        """What all of them take of the memory."""
        return self._lines.size_bytes

    def add(self, item: I) -> None:
        self._lines.add(item)

    def clear(self) -> list[I]:
        """Forget and return all."""
        items = list(self._lines)
        self._lines.clear()
        return items

    def take(self, now_s: float) -> Batch[I] | float:
        """Return the next batch, or how many seconds to wait for one; infinity: until somebody comes."""
        while (bucket := self._lines.first_bucket()) is not None:
            gathered, left = self._gathered(self._lines.line(bucket), self._least_size(bucket))
            found = self._batch_of(gathered, bucket, now_s) if gathered else None
            self._lines.taken([*left, *(found.items if isinstance(found, Batch) else ())], now_s)
            if found is not None:
                return found
        return math.inf  # nobody came, or all have left since their line was looked at

    def _batch_of(self, gathered: list[I], bucket: int, now_s: float) -> Batch[I] | float:
        """Return what to compute now of the first of a line, or how many seconds to wait; the others stay in it."""
        least = self._least_size(bucket)
        chosen, later = self._in_time(gathered, least, now_s)
        chosen, longer = self._brief(chosen, least)
        self._lines.put_back([*longer, *later], bucket)
        full = len(chosen) >= self.settings.max_size or self._lines.line(bucket).count > 0
        wait_s = 0.0 if full else self._may_wait_until(_batch(chosen, least)) - now_s
        if wait_s > 0:
            self._lines.put_back(chosen, bucket)
            return wait_s
        if least == 0:
            chosen, others = self._apart(chosen)
            self._lines.put_back(others, bucket)
        return _batch(chosen, least)

    def _least_size(self, bucket: int) -> int | None:
        """Return what items of a line are padded to at least; None: to nothing."""
        return {"bucket": bucket, "longest": 0, "nothing": None}[self.settings.pads_to]

    def _apart(self, chosen: list[I]) -> tuple[list[I], list[I]]:
        """Divide items by size where that is faster than padding all: those to compute now, and those right after.

        Who goes first is computed now. Nobody ends later by it than together, as far as is known of such batches.
        """
        sizes = sorted(item.cost for item in chosen)
        count, largest = len(sizes), sizes[-1]
        best_s, bound = _WORTH_APART * self.pace.expected_s(count * largest), 0
        for at in range(1, count):
            size = sizes[at - 1]
            if size == sizes[at]:
                continue
            took_s = self.pace.expected_s(at * size) + self.pace.expected_s((count - at) * largest)
            if took_s < best_s:
                best_s, bound = took_s, size
        if bound == 0:
            return chosen, []
        short = [item for item in chosen if item.cost <= bound]
        long = [item for item in chosen if item.cost > bound]
        return (short, long) if chosen[0].cost <= bound else (long, short)

    def _may_wait_until(self, batch: Batch[I]) -> float:
        oldest_s = min(item.arrived_s for item in batch.items)
        count = len(batch.items)
        needs_s = self.pace.expected_s(batch.cost * (count + 1) // count)
        lost_s = min(item.due_s for item in batch.items) - needs_s
        return min(oldest_s + self.settings.max_wait_ms / 1e3, lost_s)

    def _gathered(self, line: Line[I], least: int | None) -> tuple[list[I], list[I]]:
        """Take the first items of a line, as many as fit one batch, and at least one; and those who have left."""
        most, bound = self.settings.max_size, self.settings.max_cost or math.inf
        chosen: list[I] = []
        left: list[I] = []
        size = least or 0
        while len(chosen) < most and (head := line.head()) is not None:
            item = head[1]
            if item.over:
                left.append(self._lines.pop(line))
                continue
            size = max(size, item.cost)
            if chosen and (len(chosen) + 1) * size > bound:
                break
            chosen.append(self._lines.pop(line))
        return chosen, left

    def _in_time(self, chosen: list[I], least: int | None, now_s: float) -> tuple[list[I], list[I]]:
        """Divide items by how many to compute at once: as many as give most answers in time for what they take.

        Whoever is too late whatever the size counts for none; where that is everybody, all are computed at once.
        """
        dues_s = [item.due_s for item in chosen]
        if min(dues_s) == math.inf:
            return chosen, []
        took_s = [(count, self.pace.expected_s(cost)) for count, cost in _costs(chosen, least).items()]
        for share in (_SLACK_SHARE, 1.0):
            best, best_rate = 0, 0.0
            for count, seconds in took_s:
                if count <= best_rate * seconds:  # not even if all of them were kept
                    continue
                kept = sum(due_s >= now_s + seconds / share for due_s in dues_s[:count])
                if kept > best_rate * seconds:
                    best, best_rate = count, kept / seconds if seconds else math.inf
            if best:
                return chosen[:best], chosen[best:]
        return chosen, []

    def _brief(self, chosen: list[I], least: int | None) -> tuple[list[I], list[I]]:
        """Divide items that would take long together: as few at once as are computed nearly as fast as all of them."""
        costs = _costs(chosen, least)
        whole_s = self.pace.expected_s(costs[len(chosen)])
        if whole_s <= LONG_S:
            return chosen, []
        done = list(itertools.accumulate(item.cost for item in chosen))
        best, pays, smaller = len(chosen), _PAYS * done[-1] / whole_s, _class(costs[len(chosen)])
        for count, cost in costs.items():
            if _class(cost) == smaller:  # of batches of one class it is not known which are faster
                continue
            smaller, seconds = _class(cost), self.pace.expected_s(cost)
            if done[count - 1] >= pays * seconds:
                best = count
                if seconds <= LONG_S:
                    break
        return chosen[:best], chosen[best:]
