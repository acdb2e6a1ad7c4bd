"""Turning requests away: with which words, when they had better come back, and how many there were lately."""

from __future__ import annotations

import math
import zlib
from collections import deque

import structlog

from router.base.clock import Clock
from router.base.errors import DeadlineLost, Evicted, OverspillError, PromiseLost, Shed, Unavailable
from router.dispatch.assessment.candidates import assess
from router.dispatch.binding.lost_promises import LostPromises
from router.dispatch.binding.queue import QueueEntry, RequestQueue
from router.dispatch.replicas.pool import Pool
from router.policy.promise import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, backlog_s
from router.values.choice import Hopeless
from router.values.situation import Situation

log = structlog.get_logger("router")

# They count as waiting requests for so long, in the measure of overload.
_COUNT_S = 2.0
_RETRY_AFTER_S = 1.0  # where nothing better is known


class Refusals:
    """Turns entries of the queue away, and counts those who were refused for want of capacity."""

    def __init__(self, clock: Clock, queue: RequestQueue, pool: Pool) -> None:
        self._clock = clock
        self._queue = queue
        self._pool = pool
        self._lost = LostPromises()
        self._at_s: deque[float] = deque()

    def lately(self, now_s: float) -> int:
        """Count those of the last moments."""
        while self._at_s and self._at_s[0] < now_s - _COUNT_S:
            self._at_s.popleft()
        return len(self._at_s)

    def refuse(self, entry: QueueEntry, error: OverspillError) -> None:
        """Turn an entry away; it leaves the queue at once."""
        self._queue.leave(entry)
        if not entry.bound.done():
            entry.bound.set_exception(error)

    def hopeless(self, entry: QueueEntry, choice: Hopeless) -> None:
        """Turn away whose promise is lost."""
        kind = DeadlineLost if choice.deadline_lost else PromiseLost
        if not (choice.deadline_lost or entry.in_slack):
            self._at_s.append(self._pool.now_s)
        self._lost.add(entry.request)
        message = f"the promise cannot be kept: {choice.why}"
        self.refuse(entry, kind(message, retry_after_s=_spread(choice.retry_after_s, entry)))

    def below_the_lost(self, entry: QueueEntry, situation: Situation) -> bool:
        """Turn an entry away if one of a higher priority that asked for the same was; returns whether it was so."""
        if not self._lost.hold_for(entry.request):
            return False
        kind = PromiseLost if entry.request.objective.deadline_s is None else DeadlineLost
        message = "the promise cannot be kept: one of a higher priority that asked for the same was turned away"
        self.refuse(entry, kind(message, retry_after_s=_spread(backlog_s(situation), entry)))
        return True

    def crowd_out(self, newcomer: QueueEntry | None) -> None:
        """Refuse the last in order of each class that is over its bound, with a time to come back."""
        while (entry := self._queue.crowded_out(self._pool.settings)) is not None:
            kind = Shed if entry is newcomer else Evicted
            waiting = len(self._queue) - 1
            retry_after_s = self._backlog_s(entry)
            if not entry.in_slack:
                self._at_s.append(self._clock.now_s())
            self.refuse(entry, kind(f"the queue is full: {waiting} requests wait", retry_after_s=retry_after_s))

    def waited_too_long(self, entry: QueueEntry) -> None:
        """Refuse a request whose wait has reached its bound."""
        if entry.bound.done():
            return
        waited_s = self._clock.now_s() - entry.request.accepted_at_s
        deadline_s = entry.request.objective.ends_s
        retry_after_s = self._backlog_s(entry)
        if deadline_s is not None and waited_s >= deadline_s:
            message = f"the deadline of {deadline_s:g} s passed while the request waited for a free replica"
            self.refuse(entry, DeadlineLost(message, retry_after_s=retry_after_s))
            return
        message = f"no replica became free within {waited_s:.1f} s"
        self.refuse(entry, Unavailable(message, retry_after_s=retry_after_s))

    def _backlog_s(self, entry: QueueEntry) -> float:
        """When a request like this one should find a free replica, were it sent again then."""
        wait_s = _RETRY_AFTER_S
        try:
            situation, _ = assess(entry.pending, self._pool.look())
            if situation is not None:
                wait_s = backlog_s(situation)
        except Exception:  # an estimate: the refusal it goes with must reach its caller in any case
            log.exception("estimate of the backlog crashed", request_id=entry.record.request_id)
        return _spread(wait_s, entry)


def _spread(retry_after_s: float, entry: QueueEntry) -> float:
    """Return the time stretched by 0 to 25 % by request id, so that a refused burst comes back spread out."""
    stretched_s = retry_after_s * (1 + zlib.crc32(entry.record.request_id.encode()) / 2**34)
    if not math.isfinite(stretched_s):
        return MAX_RETRY_AFTER_S
    return min(max(stretched_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
