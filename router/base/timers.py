"""Bounds on waiting, and ending tasks for certain.

`Alarms` keeps time on the tier's own clock: no await of the router is without a bound.

`asyncio.wait_for` of Python 3.10 and 3.11 swallows a cancellation that arrives in the same turn as the result it waits
for. A task that uses it, anywhere below, may therefore outlive one `cancel()`; `end` and `within` do not rely on it.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Coroutine
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import structlog

from router.base.clock import Clock, Timer

log = structlog.get_logger("router")

T = TypeVar("T")

_SWEEP_ABOVE = 256
_CANCEL_AGAIN_S = 1.0


class Alarm:
    """Rings once at its time, unless it is cancelled before."""

    __slots__ = ("_keeper", "ring")

    def __init__(self, ring: Callable[[], None], keeper: Alarms) -> None:
        self.ring: Callable[[], None] | None = ring
        self._keeper = keeper

    def cancel(self) -> None:
        if self.ring is not None:
            self.ring = None
            self._keeper.one_cancelled()


class Deadline:
    """A bound on waiting that moves: it rings each time that `due_s` has come, and never while that is infinite.

    Moving it later costs an assignment: the alarm behind it looks at `due_s` when it rings, and is set again.
    """

    __slots__ = ("_alarm", "_alarms", "_looks_at_s", "_ring", "due_s")

    def __init__(self, alarms: Alarms, ring: Callable[[], None]) -> None:
        self._alarms = alarms
        self._ring = ring
        self._alarm: Alarm | None = None
        self._looks_at_s = math.inf
        self.due_s = math.inf

    def move(self, due_s: float) -> None:
        """Ring at `due_s` of the clock instead; infinity: not for now."""
        self.due_s = due_s
        if due_s < self._looks_at_s:
            self._set()

    def cancel(self) -> None:
        """Never ring again, and let go of whom it would call."""
        self.due_s = self._looks_at_s = math.inf
        self._ring = _nothing
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _set(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._looks_at_s = self.due_s
        self._alarm = self._alarms.set(self.due_s, self._look)

    def _look(self) -> None:
        due_s, rang_at_s = self.due_s, self._looks_at_s
        self._looks_at_s = math.inf
        if due_s > rang_at_s:
            if due_s < math.inf:
                self._set()
            return
        self.due_s = math.inf
        self._ring()


class Alarms:
    """All alarms of a dispatcher, on one timer of its clock. Use as `async with`: outside of it nothing rings."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = count()
        self._cancelled = 0
        self._open = False
        self._timer: Timer | None = None
        self._rings_at_s = math.inf  # what the timer is set to

    async def __aenter__(self) -> Alarms:
        self._open = True
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if self._timer is not None:
            self._timer.cancel()

    def set(self, due_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at `due_s` of the clock. What it raises is logged: the other alarms ring all the same."""
        alarm = Alarm(ring, self)
        heapq.heappush(self._heap, (due_s, next(self._order), alarm))
        if due_s < self._rings_at_s:
            self._arm()
        return alarm

    def deadline(self, ring: Callable[[], None]) -> Deadline:
        """Return a bound that calls `ring`; it waits for its first `move`."""
        return Deadline(self, ring)

    def one_cancelled(self) -> None:
        """Sweep the cancelled out once they are half of all."""
        self._cancelled += 1
        if self._cancelled > max(_SWEEP_ABOVE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].ring is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _arm(self) -> None:
        """Set the timer to the next alarm that was not cancelled."""
        while self._heap and self._heap[0][2].ring is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        due_s = self._heap[0][0] if self._heap else math.inf
        if not self._open or due_s == self._rings_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at_s = due_s
        self._timer = self._clock.call_at(due_s, self._ring_due) if due_s < math.inf else None

    def _ring_due(self) -> None:
        """Ring what is due. An alarm that is set meanwhile is looked at here too."""
        self._timer, self._rings_at_s = None, -math.inf
        now_s = self._clock.now_s()
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].ring is None):
            alarm = heapq.heappop(self._heap)[2]
            ring, alarm.ring = alarm.ring, None
            if ring is None:
                self._cancelled -= 1
                continue
            try:
                ring()
            except Exception:  # one bad alarm must not end every other bound on waiting
                log.exception("alarm crashed")
        self._rings_at_s = math.inf
        self._arm()


class Interrupted(Exception):
    """The block was ended by its `Interruptible`. Caught where that stands."""


class Interruptible:
    """A block of the current task that others can end: `with Interruptible() as block`, and `block.interrupt()`.

    Inside it looks like a cancellation; at its end it raises `Interrupted` instead. Work that swallows a cancellation
    gets another one each second. A cancellation that somebody else asked for goes on from here (from Python 3.11 on
    also when both came in one turn; before, the block's own task learns of it as an interruption).
    """

    __slots__ = ("_again", "_cancellations", "_cancelling", "_loop", "_task", "interrupted")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._cancellations = 0
        self._cancelling = 0
        self.interrupted = False

    def __enter__(self) -> Interruptible:
        task = asyncio.current_task()
        self._task = task
        if task is not None and _COUNTS_CANCELLATIONS:
            self._cancelling = task.cancelling()  # type: ignore[attr-defined,unused-ignore]  # from Python 3.11 on
        return self

    def interrupt(self, *_: object) -> None:
        """End the block; nothing once it has ended."""
        if self._task is None:
            return
        self.interrupted = True
        self._cancellations += 1
        self._task.cancel()
        self._again = self._loop.call_later(_CANCEL_AGAIN_S, self.interrupt)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self.interrupted or task is None:
            return
        if self._again is not None:
            self._again.cancel()
        others = False
        if _COUNTS_CANCELLATIONS:
            for _ in range(self._cancellations):
                left: int = task.uncancel()  # type: ignore[attr-defined,unused-ignore]
            others = left > self._cancelling
        if kind is not None and issubclass(kind, asyncio.CancelledError) and not others:
            raise Interrupted from None


_COUNTS_CANCELLATIONS = hasattr(asyncio.Task, "uncancel")


def _nothing() -> None:
    """A deadline that was cancelled calls nobody."""


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over; their exceptions stay with them."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


async def within(limit_s: float | None, work: Coroutine[Any, Any, T], news: asyncio.Future[Any] | None = None) -> T:
    """Return what `work` returns; on every other way out it is cancelled and over.

    Args:
        limit_s: None for no limit but `news`.
        news: a future that ends the wait when it is done.

    Raises:
        asyncio.TimeoutError: `limit_s` passed, or `news` came first.
    """
    task = asyncio.ensure_future(work)
    waited: set[asyncio.Future[Any]] = {task} if news is None else {task, news}
    try:
        await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        if not task.done():
            await end(task)
