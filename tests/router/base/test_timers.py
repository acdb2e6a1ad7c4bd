"""Bounds on waiting: what is late is cancelled, what is in time leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from router.base.timers import Alarms, Elapsed
from tests.support.router_fakes import VirtualClock


async def test_work_in_time_is_returned_and_late_work_is_cancelled() -> None:
    clock, ended = VirtualClock(), []

    async def work(seconds: float) -> str:
        try:
            await clock.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(clock.now_s())
            raise
        return "done"

    async with Alarms(clock) as alarms:
        assert await clock.run(alarms.within(work(1.0), clock.now_s() + 2.0)) == "done"
        began_s = clock.now_s()
        with pytest.raises(Elapsed):
            await clock.run(alarms.within(work(5.0), began_s + 2.0))
        assert ended == [pytest.approx(began_s + 2.0)]


async def test_alarms_ring_in_order_once_and_not_when_cancelled() -> None:
    clock, rung = VirtualClock(), []
    async with Alarms(clock) as alarms:
        alarms.set(3.0, lambda: rung.append("c"))
        first = alarms.set(1.0, lambda: (rung.append("a"), second.cancel()))
        second = alarms.set(2.0, lambda: rung.append("b"))
        await clock.run(clock.sleep(10.0))
        first.cancel()
    assert rung == ["a", "c"]


async def test_an_alarm_that_crashes_ends_no_other_bound() -> None:
    clock = VirtualClock()
    async with Alarms(clock) as alarms:
        alarms.set(clock.now_s() + 1.0, lambda: 1 // 0)
        with structlog.testing.capture_logs() as logs, pytest.raises(Elapsed):
            await clock.run(alarms.within(asyncio.Event().wait(), clock.now_s() + 5.0))
    assert [log["event"] for log in logs] == ["alarm crashed"]


async def test_cancelled_alarms_do_not_pile_up() -> None:
    """Each token of an answer sets an alarm far ahead and cancels it a moment later."""
    clock, rung = VirtualClock(), []
    async with Alarms(clock) as alarms:
        kept = [alarms.set(1000.0 + index, lambda: rung.append(1)) for index in range(100)]
        for _ in range(20_000):
            alarms.set(500.0, lambda: rung.append(0)).cancel()
            assert len(alarms._heap) <= 700
        await clock.run(clock.sleep(2000.0))
    assert rung == [1] * len(kept)
