"""Lines before a stage, one for each padding bucket; in each of them a request has one place, however many its inputs.

Who goes first is told by a request's turn: by its priority, then by its urgency, then by who came first. With each
batch that is taken of a request its next turn comes after those who came meanwhile: a request of very many inputs
stands in line as if they had come one batch after the other, however long a batch takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

_PATIENCE_S = 1.0  # who has no deadline is as urgent as who has one of so long
_BATCH_APART_S = 0.05  # how much less urgent the next batch of the same request is than a newcomer


class Waits(Protocol):
    """What is known of an item that waits.

    Attributes:
        cost: its size, in the unit of the buckets.
        size_bytes: what it takes of the memory.
    """

    cost: int
    size_bytes: int
    arrived_s: float

    @property
    def ticket(self) -> Hashable:
        """The request that it is of; all items of one have its priority and its deadline."""
        ...

    @property
    def priority(self) -> int: ...

    @property
    def due_s(self) -> float:
        """When its request is worth nothing any more; infinity without a deadline."""
        ...

    @property
    def over(self) -> bool:
        """Nobody waits for it any more."""
        ...


I = TypeVar("I", bound=Waits)  # noqa: E741 - an item
_Key = tuple[int, float, int]


class _Turn:
    """When a request goes; shared by its places in all lines.

    Attributes:
        key: the least goes first; it only grows.
        standing: items of the request that wait.
    """

    __slots__ = ("due_s", "key", "standing")

    def __init__(self, item: Waits, number: int) -> None:
        urgent_s = item.due_s if item.due_s < math.inf else item.arrived_s + _PATIENCE_S
        self.due_s = item.due_s
        self.key: _Key = (-item.priority, urgent_s, number)
        self.standing = 0

    def taken(self, now_s: float) -> None:
        """A batch with items of the request goes: its others come after who is here by now."""
        priority, urgent_s, number = self.key
        since_s = urgent_s if self.due_s < math.inf else max(urgent_s, now_s + _PATIENCE_S)
        self.key = (priority, since_s + _BATCH_APART_S, number)


class _Place(Generic[I]):
    """The items of one request in one line, the first one first."""

    __slots__ = ("items", "turn")

    def __init__(self, turn: _Turn) -> None:
        self.turn = turn
        self.items: deque[I] = deque()


class Line(Generic[I]):
    """The items of one bucket."""

    __slots__ = ("_heap", "_places", "count")

    def __init__(self) -> None:
        self._heap: list[tuple[_Key, Hashable, _Place[I]]] = []
        self._places: dict[Hashable, _Place[I]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[I]:
        return (item for place in self._places.values() for item in place.items)

    def place(self, ticket: Hashable, turn: _Turn) -> deque[I]:
        """Return a request's items here, to which some are to be added."""
        place = self._places.get(ticket)
        if place is None or place.turn is not turn:  # empty, and of a turn that is over
            place = self._places[ticket] = _Place(turn)
            heapq.heappush(self._heap, (turn.key, ticket, place))
        return place.items

    def head(self) -> tuple[_Key, I] | None:
        """Return the item that goes first, with the key of its turn."""
        while self._heap:
            key, ticket, place = self._heap[0]
            if not place.items:
                heapq.heappop(self._heap)
                if self._places.get(ticket) is place:
                    del self._places[ticket]
            elif key != place.turn.key:
                heapq.heapreplace(self._heap, (place.turn.key, ticket, place))
            else:
                return key, place.items[0]
        return None

    def pop(self) -> I:
        """Take the item that `head` has returned."""
        return self._heap[0][2].items.popleft()


class Lines(Generic[I]):
    """All that wait at one stage.

    Args:
        buckets: sizes that items are padded to, ascending; those that none holds wait in line 0.

    Attributes:
        size_bytes: what they take of the memory.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = buckets
        self._lines: dict[int, Line[I]] = {}
        self._turns: dict[Hashable, _Turn] = {}
        self._numbers = itertools.count()
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """Count those that wait, some of whom nobody may wait for any more."""
        return self._count

    def __iter__(self) -> Iterator[I]:
        return (item for line in self._lines.values() for item in line)

    def add(self, item: I) -> None:
        """Put an item behind the others of its request."""
        ticket = item.ticket
        turn = self._turns.get(ticket)
        if turn is None:
            turn = self._turns[ticket] = _Turn(item, next(self._numbers))
        line = self.line(self._bucket(item.cost) if self._buckets else 0)
        line.place(ticket, turn).append(item)
        self._counted(line, turn, item)

    def put_back(self, items: Sequence[I], bucket: int) -> None:
        """Put items where they were before they were popped off a line, in that order."""
        line = self.line(bucket)
        for item in reversed(items):
            turn = self._turns[item.ticket]
            line.place(item.ticket, turn).appendleft(item)
            self._counted(line, turn, item)

    def clear(self) -> None:
        self._lines.clear()
        self._turns.clear()
        self._count = self.size_bytes = 0

    def line(self, bucket: int) -> Line[I]:
        """Return the line of a bucket."""
        line = self._lines.get(bucket)
        if line is None:
            line = self._lines[bucket] = Line()
        return line

    def first_bucket(self) -> int | None:
        """Return the bucket of the item that goes first, those dropped on the way that nobody waits for."""
        best: tuple[_Key, int] | None = None
        for bucket, line in self._lines.items():
            head = line.head()
            while head is not None and head[1].over:
                self.taken((self.pop(line),), -math.inf)
                head = line.head()
            if head is not None and (best is None or head[0] < best[0]):
                best = (head[0], bucket)
        return None if best is None else best[1]

    def pop(self, line: Line[I]) -> I:
        """Take the head of a line; `taken` or `put_back` says what has become of it."""
        item = line.pop()
        line.count -= 1
        self._count -= 1
        self.size_bytes -= item.size_bytes
        self._turns[item.ticket].standing -= 1
        return item

    def taken(self, items: Sequence[I], now_s: float) -> None:
        """Items that were popped go: to be computed, or since nobody waits for them."""
        last: Hashable = None
        for item in items:
            ticket = item.ticket
            if ticket is last:  # its turn is one, with however many items
                continue
            last, turn = ticket, self._turns.get(ticket)
            if turn is None:
                continue
            if turn.standing:
                turn.taken(now_s)
            else:
                del self._turns[ticket]

    def _counted(self, line: Line[I], turn: _Turn, item: I) -> None:
        line.count += 1
        turn.standing += 1
        self._count += 1
        self.size_bytes += item.size_bytes

    def _bucket(self, cost: int) -> int:
        at = bisect_left(self._buckets, cost)
        return self._buckets[at] if at < len(self._buckets) else 0
