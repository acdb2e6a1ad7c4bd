"""Bounds on waiting, on the tier's own clock: each rings once, in order, and none holds up another."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from router.base.alarms import Alarms
from tests.support.clocks import VirtualClock


def _nothing() -> None:
    """An alarm that is only to ring."""


def _crash() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("turns", range(8))
async def test_alarms_end_in_whatever_turn_they_are_left(turns: int) -> None:
    """Crack 14: a cancellation that met the keeper between two sleeps was swallowed, and the exit hung for ever."""
    clock = VirtualClock()

    async def use() -> None:
        async with Alarms(clock) as alarms:
            alarms.set(clock.now_s() + 10.0, _nothing)
            for _ in range(5):
                await asyncio.sleep(0)
            alarms.set(clock.now_s() + 5.0, _nothing)  # earlier: the keeper sleeps anew
            for _ in range(turns):
                await asyncio.sleep(0)

    task = asyncio.ensure_future(use())
    done, _ = await asyncio.wait({task}, timeout=5)
    assert done, "leaving the alarms hangs"
    task.result()


async def test_alarms_ring_in_order_once_and_not_when_cancelled() -> None:
    clock = VirtualClock()
    rung: list[str] = []

    def first_rings() -> None:
        rung.append("a")
        second.cancel()

    async with Alarms(clock) as alarms:
        alarms.set(3.0, lambda: rung.append("c"))
        first = alarms.set(1.0, first_rings)
        second = alarms.set(2.0, lambda: rung.append("b"))
        await clock.run(clock.sleep(10.0))
        first.cancel()
    assert rung == ["a", "c"]


async def test_an_alarm_that_crashes_ends_no_other_bound() -> None:
    clock = VirtualClock()
    async with Alarms(clock) as alarms:
        alarms.set(clock.now_s() + 1.0, _crash)
        rang = asyncio.Event()
        alarms.set(clock.now_s() + 5.0, rang.set)
        with structlog.testing.capture_logs() as logs:
            await clock.run(rang.wait())
    assert [log["event"] for log in logs] == ["alarm crashed"]


async def test_cancelled_alarms_do_not_pile_up() -> None:
    """Each request sets an alarm far ahead and cancels it a moment later."""
    clock = VirtualClock()
    rung: list[int] = []
    async with Alarms(clock) as alarms:
        kept = [alarms.set(1000.0 + index, lambda: rung.append(1)) for index in range(100)]
        for _ in range(20_000):
            alarms.set(500.0, lambda: rung.append(0)).cancel()
            assert len(alarms._heap) <= 700
        await clock.run(clock.sleep(2000.0))
    assert rung == [1] * len(kept)


async def test_a_deadline_that_moves_rings_once_at_its_last_place() -> None:
    clock = VirtualClock()
    rung: list[float] = []
    async with Alarms(clock) as alarms:
        began_s = clock.now_s()
        deadline = alarms.deadline(lambda: rung.append(clock.now_s() - began_s))
        deadline.move(began_s + 10.0)
        for _ in range(1000):  # later and later: nothing is set but the first
            deadline.move(deadline.due_s + 0.01)
        assert len(alarms._heap) == 1
        await clock.advance(25.0)
        assert rung == [pytest.approx(20.0)]
        deadline.move(began_s + 100.0)
        deadline.move(began_s + 30.0)  # earlier
        await clock.advance(100.0)
        assert rung[1:] == [pytest.approx(30.0)]
        deadline.move(clock.now_s() + 5.0)
        deadline.due_s = float("inf")  # nobody waits any more
        await clock.advance(50.0)
        deadline.move(clock.now_s() + 5.0)
        deadline.cancel()
        await clock.advance(50.0)
        assert len(rung) == 2
