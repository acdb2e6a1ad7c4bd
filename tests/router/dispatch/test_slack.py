"""What runs in the slack of others: served last, turned away first, and no reason for anything."""

from __future__ import annotations

import asyncio

from router.base.errors import OverspillError
from router.values.request import LINE_PRIORITY, SLACK_PRIORITY, Outcome
from tests.support.router_fakes import FakeReplica, answer, info, world


async def _told(work: asyncio.Future) -> str:
    try:
        await work
    except OverspillError as error:
        return error.code
    return "served"


async def test_a_queue_full_of_slack_is_no_overload_and_no_reason_to_step_down() -> None:
    async with world(remote=False, ttft_slo_ms=600_000.0, max_wait_ms=600_000.0, max_sheddable_queue=64) as w:
        rungs = [FakeReplica(info(variant, device="board"), w.clock) for variant in ("int8", "pruned-int8")]
        w.dispatcher.set_replicas(rungs)
        waiting = [asyncio.ensure_future(w.ask(max_tokens=24, priority=SLACK_PRIORITY)) for _ in range(40)]
        await w.clock.settle()
        assert w.dispatcher.status().queued == 36
        assert not w.dispatcher.status().overloaded
        gauge = {"model_name": "tiny", "replica": ""}
        registry = w.dispatcher.telemetry.registry
        assert registry.get_sample_value("overspill_num_requests_waiting", gauge) == 0
        assert registry.get_sample_value("overspill_queue_wait_seconds_count") == 0
        assert not w.dispatcher._signals.what_if.arrivals_per_s("tiny", w.clock.now_s())  # nothing was imagined of them
        await w.clock.run(asyncio.gather(*waiting))
        w.nothing_is_held()


async def test_the_same_queue_of_others_is_an_overload() -> None:
    async with world(remote=False, ttft_slo_ms=600_000.0, max_wait_ms=600_000.0, max_sheddable_queue=64) as w:
        w.dispatcher.set_replicas([w.local])
        waiting = [asyncio.ensure_future(w.ask(max_tokens=24, priority=-1)) for _ in range(40)]
        await w.clock.settle()
        assert w.dispatcher.status().overloaded
        await w.clock.run(asyncio.gather(*waiting))


async def test_whoever_else_waits_goes_first_and_stays() -> None:
    async with world(
        remote=False, ttft_slo_ms=600_000.0, max_wait_ms=600_000.0, max_queue=8, max_sheddable_queue=8
    ) as w:
        w.dispatcher.set_replicas([w.local])
        ended: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await w.ask(max_tokens=8, priority=priority)
            ended.append(name)

        slack = [asyncio.ensure_future(_told(asyncio.ensure_future(ask("slack", SLACK_PRIORITY)))) for _ in range(12)]
        await w.clock.settle()
        others = [asyncio.ensure_future(_told(asyncio.ensure_future(ask("other", -1)))) for _ in range(6)]
        await w.clock.run(asyncio.gather(*slack, *others))
        assert [work.result() for work in others] == ["served"] * 6
        assert sorted(work.result() for work in slack).count("evicted") == 6
        assert ended == ["slack"] * 4 + ["other"] * 6 + ["slack"] * 2


async def test_slack_does_not_put_its_caller_back() -> None:
    async with world(remote=False) as w:
        await w.clock.run(w.ask(max_tokens=64, priority=SLACK_PRIORITY, caller="busy"))
        await w.clock.run(w.ask(max_tokens=8, caller="other"))
        shares = w.dispatcher._signals.shares
        assert shares.excess("busy", w.clock.now_s()) == 1.0


async def test_what_is_held_up_is_no_load_and_teaches_nothing_of_speeds() -> None:
    async with world(remote=False, ttft_slo_ms=600_000.0, max_wait_ms=600_000.0) as w:
        replica = FakeReplica(info("int8", holds_up=True), w.clock, slots=64)
        w.dispatcher.set_replicas([replica])
        learnt = w.dispatcher._signals.latency.step_s(replica.info, 1, 4)
        replica.slower = 50.0
        lines = [asyncio.ensure_future(w.ask(max_tokens=24, priority=LINE_PRIORITY)) for _ in range(6)]
        await w.clock.settle()
        assert replica.open == 6
        assert len(w.dispatcher._signals.in_flight) == 0
        texts = [text for _, text in await w.clock.run(asyncio.gather(*lines))]
        assert texts == [answer(24)] * 6
        assert w.dispatcher._signals.latency.step_s(replica.info, 1, 4) == learnt
        tpot = {"tier": "edge", "model": "tiny-int8"}
        assert not w.dispatcher.telemetry.registry.get_sample_value("overspill_tpot_seconds_count", tpot)
        w.nothing_is_held()


async def test_what_is_held_up_may_be_silent_for_as_long_as_others_are_there() -> None:
    async with world(remote=False, first_token_timeout_ms=1000.0, stall_timeout_ms=1000.0) as w:
        replica = FakeReplica(info("int8", holds_up=True), w.clock, slower=5000.0)  # a token takes 100 s
        w.dispatcher.set_replicas([replica])
        _, text = await w.clock.run(w.ask(max_tokens=3, priority=LINE_PRIORITY))
        assert text == answer(3)
        assert [record.outcome for record in w.dispatcher._log] == [Outcome.COMPLETED]
        assert len(replica.sent) == 1


async def test_a_held_up_attempt_that_is_cancelled_or_breaks_leaves_nothing_behind() -> None:
    async with world(remote=False) as w:
        replica = FakeReplica(info("int8", holds_up=True), w.clock, faults=[("break", 2)])
        other = FakeReplica(info("pruned-int8", holds_up=True), w.clock, faults=[None, ("hang", 0)])
        w.dispatcher.set_replicas([replica, other])
        _, text = await w.clock.run(w.ask(max_tokens=8, priority=LINE_PRIORITY))
        assert text == answer(8)
        assert (len(replica.sent), len(other.sent)) == (1, 1)
        w.dispatcher.set_replicas([other])
        line = asyncio.ensure_future(w.ask(max_tokens=8, priority=LINE_PRIORITY))
        await w.clock.settle()
        assert other.open == 1
        line.cancel()
        await w.clock.run(asyncio.wait([line]))
        assert other.open == 0
        w.nothing_is_held()
