"""Who may wait, and in which order: a bounded queue with a class for sheddable requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.dispatch.candidates import PendingRequest
from router.dispatch.record import DecisionRecord
from router.signals.in_flight import Attempt
from router.values.choice import Choice
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One request that waits for a replica; `bound` is fulfilled with its attempt there.

    Attributes:
        entered_s: when it came in, on the tier's clock.
        work_s: predicted time on an idle replica.
        promise_s: accepted → when the first part of the promise is due.
        target: replica id it waits for, None before the first decision.
        promised, wait_factor: the first choice that it had to wait for, and `LatencyModel.wait_factor` then.
    """

    pending: PendingRequest
    record: DecisionRecord
    entered_s: float
    work_s: float = 0.0
    promise_s: float = math.inf
    target: str | None = None
    promised: Choice | None = None
    wait_factor: float = 1.0
    bound: asyncio.Future[Attempt] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def request(self) -> InferenceRequest:
        return self.pending.request

    @property
    def continuing(self) -> bool:
        """Whether its answer has begun; such a request goes before all others."""
        return self.request.continuation_tokens > 0

    def order(self, *, scarce: bool) -> tuple[bool, int, float, float]:
        """Higher priority first, and then by slack, or, when capacity is scarce, by value density.

        Slack is the latest time at which the work can begin. Value density prefers short work, since everyone counts
        the same; a second of waiting makes up for a second of work, so long requests are not starved.
        """
        accepted_s = self.request.accepted_at_s
        key = accepted_s + (self.work_s if scarce else self.promise_s - self.work_s)
        return (not self.continuing, -self.request.objective.priority, key, accepted_s)


class RequestQueue:
    """The tier's queue."""

    def __init__(self) -> None:
        self._entries: dict[QueueEntry, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry for entry in self._entries if not entry.bound.done())

    def in_order(self, *, scarce: bool = False) -> list[QueueEntry]:
        """Return the waiting entries, sorted by `QueueEntry.order`."""
        waiting = [entry for entry in self._entries if not entry.bound.done()]
        waiting.sort(key=lambda entry: entry.order(scarce=scarce))
        return waiting

    def enter(self, entry: QueueEntry) -> None:
        self._entries[entry] = None

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry; one that is not in the queue is ignored."""
        self._entries.pop(entry, None)

    def crowded_out(self, settings: RouterSettings) -> QueueEntry | None:
        """Return the entry to refuse because a class is full: the last in order of that class, None if none is.

        That need not be the newcomer: one of higher priority pushes out the least. Only priority counts here, and then
        age: the newest of the least goes.
        """
        if len(self._entries) <= min(settings.max_queue, settings.max_sheddable_queue):
            return None
        waiting = [entry for entry in reversed(self._entries) if not entry.bound.done()]  # of equals, the newest
        sheddable = [entry for entry in waiting if entry.request.objective.priority < 0 and not entry.continuing]
        if len(sheddable) > settings.max_sheddable_queue:
            return max(sheddable, key=_least)
        return max(waiting, key=_least) if len(waiting) > settings.max_queue else None


def _least(entry: QueueEntry) -> tuple[bool, int, float]:
    return (not entry.continuing, -entry.request.objective.priority, entry.request.accepted_at_s)
