"""Callers who leave before the first token of a replica that is silent: it is found out as by those who stay."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from router.signals.breaker import BreakerState
from tests.router.dispatch.test_canary import NEXT, deployments
from tests.support.router_fakes import World, request, world


async def _leaves(w: World, after_s: float, **changes: Any) -> None:
    """Ask, and hang up after so long."""

    async def ask() -> None:
        running = await w.dispatcher.start(request(w.clock, **changes))
        async for _ in running.chunks:
            pass

    task = asyncio.ensure_future(ask())
    await w.clock.advance(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _state(w: World) -> BreakerState:
    return w.dispatcher._signals.health.breaker(w.local.info).state


@pytest.mark.parametrize("patience_s", [1.5, 3.0, 10.0, 60.0])
async def test_a_replica_that_hangs_is_left_alone_though_no_caller_stays_until_the_limit(patience_s: float) -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        for _ in range(3):
            await _leaves(w, patience_s, model="tiny-int8")
        for _ in range(31):  # a self-test may take as long as any first token
            if _state(w) is BreakerState.OPEN:
                break
            await w.clock.advance(1.0)
        assert _state(w) is BreakerState.OPEN
        w.nothing_is_held()


async def test_impatient_callers_say_nothing_about_a_replica() -> None:
    async with world(remote=False) as w:
        w.local.slower = 20.0
        for _ in range(20):
            await _leaves(w, 0.5, model="tiny-int8")
        await w.clock.advance(10.0)
        assert _state(w) is BreakerState.CLOSED
        assert len(w.local.sent) == 20, "no self-test was made"
        w.nothing_is_held()


async def test_a_caller_who_leaves_in_the_middle_of_an_answer_says_nothing_about_a_replica() -> None:
    async with world(remote=False) as w:
        w.local.faults = [("stall", 3)] * 10
        for _ in range(10):
            await _leaves(w, 10.0, model="tiny-int8")
        assert _state(w) is BreakerState.CLOSED
        assert len(w.local.sent) == 10


async def test_a_line_of_a_batch_that_is_stopped_says_nothing_about_a_replica() -> None:
    """A tier above may hold it up for others."""
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 10
        for number in range(6):
            line = request(w.clock, model="tiny-int8", request_id=f"l{number}")
            objective = msgspec.structs.replace(line.objective, priority=-(2**31))
            assert objective.in_slack
            await _leaves(w, 10.0, model="tiny-int8", objective=objective)
        assert _state(w) is BreakerState.CLOSED


async def test_what_a_caller_waited_for_in_vain_is_learnt_where_it_is_no_silence() -> None:
    async with world(remote=False) as w:
        w.local.slower = 50.0
        predicted = []
        for number in range(12):
            await _leaves(w, 0.9, model="tiny-int8", request_id=f"p{number}")
            predicted.append(w.record(f"p{number}")["candidates"][0]["ttft_ms"])
        assert predicted[-1] > 10 * predicted[0]


async def test_a_canary_that_hangs_steps_back_though_its_callers_leave() -> None:
    async with deployments(msgspec.structs.replace(NEXT, weight=0.3)) as d:
        await d.send(range(40))
        d.new.faults = ["hang"] * 1000
        left = 0
        for number in range(100, 400, 8):
            asks = [asyncio.ensure_future(d.ask(number + at)) for at in range(8)]
            await d.clock.advance(10.0)
            for ask in asks:
                left += ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            if d.canary.why:
                break
        assert d.canary.why
        assert left < 20


async def test_callers_who_leave_both_deployments_alike_step_no_canary_back() -> None:
    async with deployments(msgspec.structs.replace(NEXT, weight=0.3)) as d:
        for replica in (*d.old, d.new):
            replica.slower = 3.0
        for number in range(0, 1600, 8):
            asks = [asyncio.ensure_future(d.ask(number + at)) for at in range(8)]
            await d.clock.advance(0.1 + 0.05 * (number // 8 % 5))
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
        assert d.canary.why == ""
