"""Who may wait, and in which order: a bounded queue with a class for sheddable requests."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.values.request import InferenceRequest
from router.values.settings import RouterSettings

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Place(Generic[T]):
    """One request's place in the queue; `bound` is fulfilled with what it waits for.

    Attributes:
        work_s: predicted time on an idle replica.
        promise_s: accepted → when the first part of the promise is due.
        continuing: it already began to answer, and goes before everything else: its caller is reading.
    """

    request: InferenceRequest
    work_s: float = 0.0
    promise_s: float = math.inf
    continuing: bool = False
    bound: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def order(self, *, scarce: bool) -> tuple[bool, int, float, float]:
        """Higher priority first, and then by slack, or, when capacity is scarce, by value density.

        Slack is the latest time at which the work can begin. Value density prefers short work, since everyone counts
        the same; a second of waiting makes up for a second of work, so long requests are not starved.
        """
        accepted_s = self.request.accepted_at_s
        key = accepted_s + (self.work_s if scarce else self.promise_s - self.work_s)
        return (not self.continuing, -self.request.objective.priority, key, accepted_s)


class Admission(Generic[T]):
    """The tier's queue."""

    def __init__(self) -> None:
        self._places: dict[Place[T], None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def in_order(self, *, scarce: bool = False) -> list[Place[T]]:
        """Everyone who waits, first come first by `Place.order`."""
        waiting = [place for place in self._places if not place.bound.done()]
        waiting.sort(key=lambda place: place.order(scarce=scarce))
        return waiting

    def enter(self, place: Place[T]) -> None:
        self._places[place] = None

    def leave(self, place: Place[T]) -> None:
        """Give the place back; a place that was given back already stays so."""
        self._places.pop(place, None)

    def crowded_out(self, settings: RouterSettings) -> Place[T] | None:
        """Whom to turn away because a class is full: the last in order of the class that is.

        That need not be the newcomer: one of higher priority pushes out the least. Only priority counts here, and then
        age: the newest of the least goes.
        """
        if len(self._places) <= min(settings.max_queue, settings.max_sheddable_queue):
            return None
        waiting = [place for place in reversed(self._places) if not place.bound.done()]  # of equals, the newest
        sheddable = [place for place in waiting if place.request.objective.priority < 0 and not place.continuing]
        if len(sheddable) > settings.max_sheddable_queue:
            return max(sheddable, key=_least)
        return max(waiting, key=_least) if len(waiting) > settings.max_queue else None


def _least(place: Place[T]) -> tuple[bool, int, float]:
    return (not place.continuing, -place.request.objective.priority, place.request.accepted_at_s)
