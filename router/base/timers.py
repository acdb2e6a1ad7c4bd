"""Bounds on waiting, and ending tasks for certain.

`Alarms` keeps time on the tier's own clock: no await of the router is without a bound.

`asyncio.wait_for` of Python 3.10 and 3.11 swallows a cancellation that arrives in the same turn as the result it waits
for. A task that uses it, anywhere below, may therefore outlive one `cancel()`; `end` and `within` do not rely on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import structlog

from router.base.clock import Clock

log = structlog.get_logger("router")

T = TypeVar("T")

_SWEEP_ABOVE = 256
_CANCEL_AGAIN_S = 1.0
_GRACE_S = 5.0  # for a cancelled piece of work to end; one that does not is left behind


class Elapsed(Exception):
    """The work was not done in time. Never leaves the router."""


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


class Alarms:
    """All alarms of a dispatcher, rung by one task. Use as `async with`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = count()
        self._cancelled = 0
        self._sleeps_until_s = float("inf")
        self._nudge = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Alarms:
        self._keeper = asyncio.create_task(self._keep(), name="router-alarms")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    def set(self, due_s: float, ring: Callable[[], None]) -> Alarm:
        """Call `ring` at `due_s` of the clock. What it raises is logged: the other alarms ring all the same."""
        alarm = Alarm(ring, self)
        heapq.heappush(self._heap, (due_s, next(self._order), alarm))
        if due_s < self._sleeps_until_s:
            self._nudge.set()
        return alarm

    def one_cancelled(self) -> None:
        """Sweep the cancelled out once they are half of all: each token of an answer sets one and cancels it."""
        self._cancelled += 1
        if self._cancelled > max(_SWEEP_ABOVE, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].ring is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    async def within(self, work: Coroutine[Any, Any, T], due_s: float) -> T:
        """Return what `work` returns.

        Unlike `asyncio.wait_for` it keeps time on the tier's clock, never swallows the caller's cancellation (Python
        3.10 and 3.11 do when both happen at once), and does not wait for ever for work that ignores being cancelled.

        Raises:
            Elapsed: `due_s` came first; the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = self.set(due_s, lambda: None if bell.done() else bell.set_result(None))
        try:
            waited: set[asyncio.Future[Any]] = {task, bell}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Elapsed
            return task.result()
        finally:
            alarm.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE_S)
                if task.done() and not task.cancelled():
                    task.exception()  # seen: it lost against the bell

    async def _keep(self) -> None:
        while True:
            self._nudge.clear()
            self._sleeps_until_s = self._ring_due()
            if self._sleeps_until_s == float("inf"):
                await self._nudge.wait()
                continue
            sleep = asyncio.ensure_future(self._clock.sleep(max(0.0, self._sleeps_until_s - self._clock.now_s())))
            nudge = asyncio.ensure_future(self._nudge.wait())
            try:
                await asyncio.wait({sleep, nudge}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleep.cancel()
                nudge.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(sleep, nudge, return_exceptions=True)

    def _ring_due(self) -> float:
        """Ring what is due; return when the next alarm is, infinity if there is none."""
        now_s = self._clock.now_s()
        while self._heap:
            due_s, _, alarm = self._heap[0]
            if alarm.ring is not None and due_s > now_s:
                return due_s
            heapq.heappop(self._heap)
            ring, alarm.ring = alarm.ring, None
            if ring is None:
                self._cancelled -= 1
                continue
            try:
                ring()
            except Exception:  # one bad alarm must not end every other bound on waiting
                log.exception("alarm crashed")
        return float("inf")


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
