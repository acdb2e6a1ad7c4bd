"""Which running answers are lost, and that under overload their slots go to those who wait."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from router.base.errors import OverspillError
from router.dispatch.attempts.give_up import LOST, chance_left, give_up_lost
from router.signals.in_flight import Attempt
from router.values.length import EDGES, LengthCurve
from tests.support.router_fakes import World, answer, request, world

CURVE = LengthCurve.of([math.exp(-edge / 100.0) for edge in EDGES])


async def running(w: World, **wish: Any) -> tuple[Attempt, asyncio.Task[Any]]:
    task = asyncio.ensure_future(w.ask(**wish))
    await w.clock.settle()
    (attempt,) = list(w.dispatcher._signals.in_flight)
    return attempt, task


async def ended(w: World, *tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await w.clock.run(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), None))
    w.nothing_is_held()


async def test_the_chance_falls_while_an_answer_runs_and_does_not_end() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.answer_tokens = 10**6
        attempt, task = await running(w, deadline_s=5.0)
        attempt.length = CURVE
        chances = []
        for _ in range(9):
            chances.append(chance_left(attempt, w.clock.now_s()))
            await w.clock.advance(0.5)
        assert chances == sorted(chances, reverse=True)
        assert chances[0] > 0.8
        left_s = attempt.ends_s - w.clock.now_s()
        expected = 1.0 - math.exp(-left_s / 0.02 / 100.0)
        assert chance_left(attempt, w.clock.now_s()) == pytest.approx(expected, abs=0.06), "it forgets what is out"
        assert chance_left(attempt, attempt.ends_s) == 0.0
        await ended(w, task)


async def test_its_own_pace_counts_and_not_the_one_that_was_predicted() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.answer_tokens, w.local.slower = 10**6, 20.0
        attempt, task = await running(w, deadline_s=10.0)
        attempt.length = LengthCurve.exactly(60)
        assert chance_left(attempt, w.clock.now_s()) == 1.0, "0.05 s and 60 tokens of 0.02 s, it was thought"
        await w.clock.advance(3.5)
        assert attempt.pace_s == pytest.approx(0.4, rel=0.2)
        assert chance_left(attempt, w.clock.now_s()) == 0.0
        await ended(w, task)


async def test_before_the_first_token_the_prefill_that_is_left_counts() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        attempt, task = await running(w, prompt_tokens=1000, deadline_s=2.5)
        attempt.length = LengthCurve.exactly(60)
        assert chance_left(attempt, w.clock.now_s()) == 1.0, "1 s, then 1.2 s"
        attempt.length = LengthCurve.exactly(90)
        assert chance_left(attempt, w.clock.now_s()) == 0.0, "1 s, then 1.8 s"
        await ended(w, task)


async def test_what_has_no_length_or_no_deadline_is_never_lost() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.slower, w.local.answer_tokens = 1000.0, 10**6
        attempt, task = await running(w)
        await w.clock.advance(500.0)
        assert chance_left(attempt, w.clock.now_s()) == 1.0
        attempt.length = None
        assert chance_left(attempt, w.clock.now_s()) == 1.0
        assert give_up_lost([attempt], w.clock.now_s() + 1e6) == 0
        await ended(w, task)


async def test_only_the_lost_are_ended_and_only_once() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.answer_tokens = 10**6
        asks = [request(w.clock, deadline_s=deadline_s) for deadline_s in (2.0, 60.0)]
        tasks = [asyncio.ensure_future(w.read(ask)) for ask in asks]
        await w.clock.advance(1.0)
        attempts = list(w.dispatcher._signals.in_flight)
        for attempt in attempts:
            attempt.length = LengthCurve.exactly(200)
        now_s = w.clock.now_s()
        assert [chance_left(attempt, now_s) < LOST for attempt in attempts] == [True, False]
        assert (give_up_lost(attempts, now_s), give_up_lost(attempts, now_s)) == (1, 0)
        await w.clock.settle()
        assert [task.done() for task in tasks] == [True, False]
        assert w.record(asks[0].request_id)["outcome"] == "degraded"
        await ended(w, tasks[1])


async def overloaded(w: World) -> tuple[list[asyncio.Task[Any]], list[asyncio.Task[Any]], list[Any]]:
    """Four slow answers hold the slots of a device for 20 s that cannot end in time; eight that could wait."""
    w.dispatcher.set_replicas([w.local])
    w.local.slower, w.local.answer_tokens = 5.0, 10**6
    asks = [request(w.clock, deadline_s=20.0, max_tokens=190, ignore_eos=True) for _ in range(4)]
    lost = [asyncio.ensure_future(w.read(ask)) for ask in asks]
    await w.clock.settle()
    assert len(w.local.sent) == 4
    waiting = [asyncio.ensure_future(w.ask(max_tokens=2, ignore_eos=True, deadline_s=15.0)) for _ in range(8)]
    await w.clock.advance(4.0)
    return lost, waiting, asks


@pytest.mark.parametrize("policy", ["slo-utility", "earliest-deadline"])
async def test_under_overload_a_lost_answer_gives_its_slot_to_those_who_wait(policy: str) -> None:
    async with world(remote=False, policy=policy, max_queue=20, max_wait_ms=600_000.0) as w:
        lost, waiting, asks = await overloaded(w)
        results = await w.clock.run(asyncio.gather(*waiting, return_exceptions=True))
        assert [text for _, text in results] == [answer(2)] * 8
        given_up = [ask for ask in asks if "given_up" in str(w.record(ask.request_id)["events"])]
        assert given_up, "never silently"
        for ask in given_up:
            record = w.record(ask.request_id)
            assert record["outcome"] == "degraded"
            assert record["finish_ms"] < 20_000
        await w.clock.run(asyncio.gather(*lost, return_exceptions=True))
        w.nothing_is_held()


async def test_where_it_is_switched_off_they_run_to_their_deadline() -> None:
    async with world(remote=False, max_queue=20, give_up="off", max_wait_ms=600_000.0) as w:
        lost, waiting, asks = await overloaded(w)
        results = await w.clock.run(asyncio.gather(*waiting, return_exceptions=True))
        assert all(isinstance(result, OverspillError) for result in results)
        await w.clock.run(asyncio.gather(*lost))
        assert [w.record(ask.request_id)["finish_ms"] for ask in asks] == pytest.approx([20_000.0] * 4, abs=1)
        w.nothing_is_held()


async def test_where_nobody_waits_they_run_to_their_deadline() -> None:
    async with world(remote=False, max_queue=20) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.slower, w.local.answer_tokens = 5.0, 10**6
        ask = request(w.clock, deadline_s=5.0, max_tokens=90, ignore_eos=True)
        await w.clock.run(w.read(ask))
        assert w.record(ask.request_id)["finish_ms"] == pytest.approx(5000.0, abs=1)
        assert "given_up" not in str(w.record(ask.request_id)["events"])
        w.nothing_is_held()
