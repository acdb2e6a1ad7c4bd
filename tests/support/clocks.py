"""Clocks for tests: one that jumps from sleeper to sleeper, and the machine's own that a test can put forward."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

from router.base.clock import MonotonicClock
from tests.support.waiting import until

T = TypeVar("T")


class VirtualClock:
    """Time stands still while anything can run, then jumps to the next sleeper."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now_s(self) -> float:
        return self._now_s

    def pass_s(self, duration_s: float) -> None:
        """Put it forward, for code that never sleeps on it."""
        self._now_s += duration_s

    async def sleep(self, duration_s: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(duration_s, 0.0), next(self._order), woken))
        await woken

    def call_at(self, due_s: float, ring: Callable[[], None]) -> asyncio.Future[None]:
        due = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (due_s, next(self._order), due))
        due.add_done_callback(lambda due: None if due.cancelled() else ring())
        return due

    async def settle(self) -> None:
        """Let everything run that can run without time passing."""
        loop: Any = asyncio.get_running_loop()
        for _ in range(100_000):
            await asyncio.sleep(0)
            if not loop._ready:
                return
        raise AssertionError("something runs for ever without waiting")

    async def step(self) -> bool:
        """Jump to the next sleeper; returns False if nobody sleeps."""
        await self.settle()
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        if not self._sleepers:
            return False
        self._now_s = max(self._now_s, self._sleepers[0][0])
        heapq.heappop(self._sleepers)[2].set_result(None)
        return True

    async def run(self, work: Awaitable[T], limit_s: float = 3600.0) -> T:
        """Run `work` to its end; fails if that takes longer than `limit_s` of this clock: then something hangs."""
        task = asyncio.ensure_future(work)
        ends_s = self._now_s + limit_s
        try:
            await self.settle()
            while not task.done():
                assert await self.step(), "nothing can ever happen again, and the work is not done"
                await self.settle()
                assert task.done() or self._now_s < ends_s, f"not done after {limit_s} s"
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def advance(self, duration_s: float) -> None:
        """Let that much time pass."""
        await self.run(self.sleep(duration_s))


class SteeredClock(MonotonicClock):
    """The machine's clock, which a test can put forward.

    Attributes:
        ahead_s: by how much it was.
        looks: how many sleeps of it have ended.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.looks = 0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    async def sleep(self, duration_s: float) -> None:
        ends_at_s = self.now_s() + duration_s
        while self.now_s() < ends_at_s:  # noqa: ASYNC110 (time is what it waits for)
            await asyncio.sleep(0.001)
        self.looks += 1

    def call_at(self, due_s: float, ring: Callable[[], None]) -> asyncio.Task[None]:
        sleeper = asyncio.ensure_future(self.sleep(due_s - self.now_s()))
        sleeper.add_done_callback(lambda sleeper: None if sleeper.cancelled() else ring())
        return sleeper

    async def pass_by(self, duration_s: float, looks: int) -> None:
        """Jump ahead so often, and let whoever slept look at the clock each time."""
        for _ in range(looks):
            seen = self.looks
            self.ahead_s += duration_s
            await until(lambda seen=seen: self.looks > seen)
