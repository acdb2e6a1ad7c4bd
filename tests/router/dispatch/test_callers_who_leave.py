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


async def _word_is_asked(w: World) -> None:
    """Let a self-test that runs come to its end: it may take as long as any first token."""
    for _ in range(31):
        await w.clock.advance(1.0)


def _first_predicted_ms(w: World, request_id: str) -> float:
    """What was predicted for a request on the one replica that it may go to."""
    return w.record(request_id)["candidates"][0]["ttft_ms"]


async def _teaches_to_expect_long(w: World) -> None:
    """Callers who wait in vain, each for too short a time to call it silence."""
    for number in range(12):
        await _leaves(w, 0.9, model="tiny-int8", request_id=f"t{number}")
    assert _first_predicted_ms(w, "t11") > 10 * _first_predicted_ms(w, "t0")


async def test_a_replica_that_hangs_is_not_expected_to_take_ever_longer() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        await _teaches_to_expect_long(w)
        for _ in range(3):
            await _leaves(w, 3.0, model="tiny-int8")
        await _word_is_asked(w)
        assert _state(w) is not BreakerState.CLOSED
        w.nothing_is_held()


async def test_deadlines_that_pass_do_not_make_a_replica_that_hangs_look_slow() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        for number in range(12):
            await _leaves(w, 5.0, model="tiny-int8", deadline_s=0.9, request_id=f"d{number}")
        for _ in range(3):
            await _leaves(w, 5.0, model="tiny-int8", deadline_s=3.0)
        await _word_is_asked(w)
        assert _state(w) is not BreakerState.CLOSED


async def test_a_longer_prompt_is_waited_for_as_much_longer() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 12
        await _teaches_to_expect_long(w)
        w.local.faults = ["hang"] * 3
        for _ in range(3):
            await _leaves(w, 3.0, model="tiny-int8", prompt_tokens=1500)
        await _word_is_asked(w)
        assert _state(w) is BreakerState.CLOSED
        assert len(w.local.sent) == 15, "no self-test was made"


async def test_an_answer_says_that_the_replica_is_as_slow_as_it_seemed() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 12
        await _teaches_to_expect_long(w)
        await w.clock.run(w.ask(model="tiny-int8"))
        before = len(w.local.sent)
        w.local.faults = ["hang"] * 3
        for _ in range(3):
            await _leaves(w, 1.2, model="tiny-int8")
        await _word_is_asked(w)
        assert len(w.local.sent) == before + 3, "no self-test was made"


async def test_what_is_known_of_a_silent_replica_goes_with_it() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        await _teaches_to_expect_long(w)
        assert set(w.dispatcher._feedback._bars) == {w.local.info.replica_id}
        w.dispatcher.set_replicas([w.small])
        assert not w.dispatcher._feedback._bars


@pytest.mark.parametrize("stays", [False, True])
async def test_a_replica_that_is_only_slow_is_learnt_and_others_are_asked(stays: bool) -> None:
    """It answers our own word in time, and all that its callers ask of it far too late."""
    async with world(remote=False, first_token_timeout_ms=10_000.0, max_attempts=1) as w:
        w.local.slower = 50.0
        predicted = []
        for number in range(30):
            changes = {"model": "tiny-int8", "prompt_tokens": 1000, "request_id": f"s{number}"}
            await _leaves(w, 20.0 if stays else 9.9, **changes)
            await w.clock.advance(5.0)
            if w.record(f"s{number}")["candidates"]:
                predicted.append(_first_predicted_ms(w, f"s{number}"))
        assert _state(w) is BreakerState.CLOSED
        assert predicted[-1] > 4 * predicted[0]
        route, _ = await w.clock.run(w.ask(prompt_tokens=1000, ttft_s=2.0))
        assert route.variant == w.small.info.variant


async def test_tokens_that_show_nothing_are_signs_of_life() -> None:
    async with world(remote=False) as w:
        w.local.faults, w.local.answer_tokens = ["wordless"] * 10, 10**4
        for _ in range(6):
            await _leaves(w, 10.0, model="tiny-int8")
        await _word_is_asked(w)
        assert _state(w) is BreakerState.CLOSED
        assert len(w.local.sent) == 6, "no self-test was made"
        assert not w.dispatcher._feedback._bars
        w.nothing_is_held()


async def test_callers_who_leave_at_once_ask_for_one_self_test() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        asks = [asyncio.ensure_future(w.ask(model="tiny-int8")) for _ in range(4)]
        await w.clock.advance(5.0)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        await _word_is_asked(w)
        assert _state(w) is not BreakerState.CLOSED
        assert len(w.local.sent) == 5
        w.nothing_is_held()


async def test_an_estimated_prompt_says_nothing_of_silence() -> None:
    async with world(remote=False) as w:
        w.local.faults = ["hang"] * 100
        await _teaches_to_expect_long(w)
        for _ in range(6):
            await _leaves(w, 10.0, model="tiny-int8", prompt_slack=10)
        await _word_is_asked(w)
        assert _state(w) is BreakerState.CLOSED


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
