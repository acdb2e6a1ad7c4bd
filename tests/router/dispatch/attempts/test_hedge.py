"""A second replica is asked beside one whose first token is late: within a budget, elsewhere, and without a seam."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import DeadlineLost, ReplicasFailed
from router.dispatch.attempts.hedge import HedgeBudget
from router.values.prompt import TextPrompt
from router.values.settings import HedgeSettings
from tests.support.router_fakes import World, answer, request, world

GENEROUS = HedgeSettings(budget=1.0)


@asynccontextmanager
async def hedging(**settings: Any) -> AsyncGenerator[World, None]:
    """A device and a cloud of one rung each, and a budget that pays for a hedge at once."""
    async with world(**{"hedge": GENEROUS, "policy": "local-first", **settings}) as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        w.dispatcher._hedges.earn(10.0, 1.0)
        yield w


def metric(w: World, result: str) -> float:
    return w.dispatcher.telemetry.registry.get_sample_value("overspill_hedges_total", {"result": result}) or 0.0


def events(w: World, ask: Any) -> list[str]:
    return [event["event"] for event in w.record(ask.request_id)["events"]]


@pytest.mark.interpreted
async def test_a_first_token_that_is_late_is_overtaken_without_a_seam() -> None:
    async with hedging() as w:
        w.local.faults = ["hang"]
        learnt = []
        real = w.dispatcher._signals.latency.observe_ttft
        w.dispatcher._signals.latency.observe_ttft = lambda info, work, ttft_s, *more, **seen: (
            learnt.append((info.tier, ttft_s, seen.get("censored", False))) or real(info, work, ttft_s, *more, **seen)
        )
        ask = request(w.clock, max_tokens=12, session="a")
        route, text = await w.clock.run(w.read(ask))
        assert text == answer(12)
        assert (route.tier, route.reason) == ("cloud", "hedge")
        record = w.record(ask.request_id)
        assert events(w, ask) == ["sent", "hedged", "hedge_won", "first_token", "finished"]
        assert (record["outcome"], record["chosen"]["replica"]) == ("completed", w.cloud.info.replica_id)
        late_s = record["events"][1]["at_ms"] / 1e3
        assert late_s == pytest.approx(record["predicted_ttft_high_ms"] / 1e3, abs=0.001)
        (loser, waited_s, bound), (winner, ttft_s, known) = sorted(learnt, key=lambda seen: seen[0] != "edge")
        assert (loser, winner, bound, known) == ("edge", "cloud", True, False)
        assert ttft_s < waited_s == pytest.approx(late_s + ttft_s), "each from when it was sent itself"
        assert (metric(w, "won"), metric(w, "lost")) == (1, 0)
        assert set(w.dispatcher.breaker_states().values()) <= {"closed"}
        assert w.dispatcher._binder.pool.session_replica["a"] == w.cloud.info.replica_id
        w.nothing_is_held()


async def test_the_loser_is_let_go_at_the_first_token_of_the_winner() -> None:
    async with hedging() as w:
        w.local.faults = ["hang"]
        running = await w.clock.run(w.dispatcher.start(request(w.clock, max_tokens=12)))
        await w.clock.settle()
        assert (w.local.open, w.cloud.open) == (0, 1)
        assert w.dispatcher._signals.in_flight.at(w.local.info.replica_id).requests == 0
        await running.chunks.aclose()
        w.nothing_is_held()


async def test_a_hedge_that_comes_second_is_let_go() -> None:
    async with hedging() as w:
        w.cloud.slower = 1000.0
        w.local.slower = 4.0
        ask = request(w.clock, 50, max_tokens=12)
        route, text = await w.clock.run(w.read(ask))
        assert (route.tier, text) == ("edge", answer(12))
        assert route.reason != "hedge"
        assert events(w, ask) == ["sent", "hedged", "hedge_lost", "first_token", "finished"]
        assert (metric(w, "won"), metric(w, "lost")) == (0, 1)
        w.nothing_is_held()


async def test_a_token_in_time_makes_no_hedge() -> None:
    async with hedging() as w:
        for _ in range(5):
            await w.clock.run(w.ask(max_tokens=4))
        assert not w.cloud.sent


@pytest.mark.parametrize(
    ("settings", "ask"),
    [
        ({"hedge": HedgeSettings(enabled=False)}, {}),
        ({}, {"locality": "local-only"}),
        ({}, {"min_quality": 0.99}),
        ({}, {"attempts_left": 1}),
        ({}, {"priority": -1}),
        ({"max_attempts": 1}, {}),
        ({}, {"continuation": "w0 w1 ", "continuation_tokens": 2}),
    ],
    ids=["off", "local-only", "quality", "one attempt left", "background", "one attempt", "goes on with an answer"],
)
async def test_constraints_hold_through_a_hedge(settings: dict[str, Any], ask: dict[str, Any]) -> None:
    async with hedging(first_token_timeout_ms=5000.0, **settings) as w:
        if "min_quality" in ask:
            w.local.info = replace(w.local.info, quality=0.995)
            w.cloud.info = replace(w.cloud.info, quality=0.5)
            w.dispatcher.set_replicas([w.local, w.cloud])
        w.local.faults = [("stall", 0)] * 4
        asking = asyncio.ensure_future(w.read(request(w.clock, deadline_s=4.0, max_tokens=12, **ask)))
        with pytest.raises(DeadlineLost):
            await w.clock.run(asyncio.wait_for(asking, None))
        assert not w.cloud.sent
        assert metric(w, "won") + metric(w, "lost") == 0


async def test_none_goes_to_the_same_device_or_to_one_without_room() -> None:
    async with hedging() as w:
        w.local.faults, w.small.faults = ["hang", "hang"], ["hang"]
        for rung in (w.local, w.small):
            rung.info = replace(rung.info, device="npu")
        w.dispatcher.set_replicas([w.local, w.small])
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.ask(deadline_s=4.0, max_tokens=12))
        assert len(w.local.sent) + len(w.small.sent) == 1
        w.cloud.others = w.cloud.slots
        w.dispatcher.set_replicas([w.local, w.cloud])
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.ask(deadline_s=4.0, max_tokens=12))
        assert not w.cloud.sent


@pytest.mark.interpreted
async def test_none_goes_while_anybody_waits_or_the_tier_is_overloaded() -> None:
    async with hedging(max_queue=1000, ttft_slo_ms=60_000.0) as w:
        w.local.faults = ["hang"]
        asking = asyncio.ensure_future(w.ask(deadline_s=4.0, max_tokens=12))
        await w.clock.settle()
        w.local.others = w.local.slots
        waiting = asyncio.ensure_future(w.ask(locality="local-only", deadline_s=30.0))
        await asyncio.gather(w.clock.run(asyncio.wait_for(asking, None)), return_exceptions=True)
        assert not w.cloud.sent
        w.local.others = 0
        w.dispatcher.capacity_changed()
        await w.clock.run(asyncio.wait_for(waiting, None))
    async with hedging() as w:
        w.local.faults = ["hang"]
        w.dispatcher._signals.ladder.overloaded = True
        w.dispatcher._binder._update_ladder = lambda: None
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.ask(deadline_s=4.0, max_tokens=12))
        assert not w.cloud.sent


async def test_a_prompt_that_failed_somewhere_is_not_hedged() -> None:
    async with hedging() as w:
        w.cloud.faults = ["crash"]
        await asyncio.gather(
            w.clock.run(w.ask(prompt=TextPrompt("bad"), locality="cloud-only")), return_exceptions=True
        )
        w.local.faults = ["hang", "hang"]
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.ask(prompt=TextPrompt("bad"), deadline_s=4.0, max_tokens=12))
        assert len(w.cloud.sent) == 1
        await w.clock.run(w.ask(prompt=TextPrompt("good"), deadline_s=4.0, max_tokens=12))
        assert len(w.cloud.sent) == 2, "others are"


async def test_when_the_first_fails_beside_it_the_second_answers() -> None:
    async with hedging(first_token_timeout_ms=500.0) as w:
        w.local.faults = ["hang"]
        w.cloud.slower = 17.0
        ask = request(w.clock, 50, max_tokens=4)
        route, text = await w.clock.run(w.read(ask))
        assert (route.tier, text) == ("cloud", answer(4))
        assert events(w, ask) == ["sent", "hedged", "attempt_failed", "hedge_won", "first_token", "finished"]
        assert len(w.local.sent) == 1
        w.nothing_is_held()


async def test_when_both_fail_both_are_told_and_a_third_may_try() -> None:
    async with hedging(first_token_timeout_ms=500.0, max_attempts=2) as w:
        w.local.faults = ["hang"]
        w.cloud.faults = ["crash"]
        ask = request(w.clock, 50, max_tokens=4)
        with pytest.raises(ReplicasFailed) as raised:
            await w.clock.run(w.read(ask))
        assert raised.value.attempts == 2
        assert events(w, ask).count("attempt_failed") == 2
        assert metric(w, "lost") == 1
        w.nothing_is_held()


async def test_a_caller_who_leaves_ends_both() -> None:
    async with hedging() as w:
        w.local.faults, w.cloud.faults = ["hang"], ["hang"]
        asking = asyncio.ensure_future(w.ask())
        await w.clock.advance(2.0)
        assert (w.local.open, w.cloud.open) == (1, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await w.clock.settle()
        w.nothing_is_held()


async def test_the_deadline_ends_both_and_is_nobodys_failure() -> None:
    async with hedging() as w:
        w.local.faults, w.cloud.faults = ["hang"], ["hang"]
        ask = request(w.clock, deadline_s=3.0)
        with pytest.raises(DeadlineLost):
            await w.clock.run(w.read(ask))
        assert w.clock.now_s() - ask.accepted_at_s == pytest.approx(3.0)
        assert "attempt_failed" not in events(w, ask)
        w.nothing_is_held()


async def test_one_of_two_may_give_its_slot_up() -> None:
    async with hedging() as w:
        w.local.faults = ["hang"]
        w.cloud.slower = 20.0
        asking = asyncio.ensure_future(w.ask(max_tokens=4, deadline_s=30.0))
        await w.clock.advance(0.5)
        (first,) = w.dispatcher._signals.in_flight._by_replica[w.local.info.replica_id]
        assert first.give_up is not None
        assert first.give_up()
        route, text = await w.clock.run(asyncio.wait_for(asking, None))
        assert (route.tier, route.reason, text) == ("cloud", "hedge", answer(4))
        w.nothing_is_held()


async def test_a_hedge_that_breaks_later_is_continued_like_any_other() -> None:
    async with hedging() as w:
        w.local.faults = ["hang"]
        w.cloud.faults = [("break", 5)]
        route, text = await w.clock.run(w.ask(max_tokens=12))
        assert text == answer(12)
        assert route.tier == "cloud"
        assert [len(r.sent) for r in (w.local, w.cloud)] == [2, 1]
        w.nothing_is_held()


@given(
    costs=st.lists(st.floats(0.0, 50.0), max_size=60),
    share=st.floats(0.0, 1.0),
    hedges=st.lists(st.floats(-1.0, 50.0), max_size=60),
)
def test_hedges_never_cost_more_than_their_share(costs: list[float], share: float, hedges: list[float]) -> None:
    budget, spent_s = HedgeBudget(), 0.0
    for own_s, second_s in zip(costs, hedges, strict=False):
        budget.earn(own_s, share)
        before_s = budget.left_s
        if budget.spend(second_s):
            spent_s += second_s
        assert budget.left_s == pytest.approx(before_s - (second_s if budget.left_s < before_s else 0.0))
        assert 0.0 <= budget.left_s <= 60.0
    assert spent_s <= share * sum(costs) + 1e-6


@pytest.mark.interpreted
async def test_with_a_fifth_of_all_first_tokens_late_the_extra_work_stays_within_a_twentieth() -> None:
    async with world(policy="local-first") as w:
        w.dispatcher.set_replicas([w.local, w.cloud])
        budget, first_s, second_s = w.dispatcher._hedges, [], []
        earn, spend = budget.earn, budget.spend
        budget.earn = lambda cost_s, share: first_s.append(cost_s) or earn(cost_s, share)
        budget.spend = lambda cost_s: spend(cost_s) and (second_s.append(cost_s) or True)
        for index in range(300):
            w.local.faults = ["hang"] if index % 5 == 0 else []
            await asyncio.gather(w.clock.run(w.ask(max_tokens=12, deadline_s=6.0)), return_exceptions=True)
        assert len(second_s) == metric(w, "won") + metric(w, "lost") >= 5
        assert 0.01 < sum(second_s) / sum(first_s) <= 0.05
