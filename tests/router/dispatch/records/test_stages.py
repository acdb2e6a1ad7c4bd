"""From what happened to a request to the stages that become its spans."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from router.base.errors import OverspillError
from router.dispatch.records.stages import stages_of
from router.values.request import InferenceRequest
from router.values.settings import HedgeSettings
from router.values.trace import Stage, TraceContext
from tests.support.router_fakes import UPSTREAM, World, request, world

OF_A_TRACE = TraceContext(trace_id=7, span_id=9, parent_id=None, sampled=True)


async def told(w: World, what: InferenceRequest, *, traced: bool = True) -> list[Stage]:
    """Send a request, and return its stages, checked for what holds of all."""
    with contextlib.suppress(OverspillError):
        await w.clock.run(w.read(what))
    record = w.dispatcher.decision(what.request_id)
    assert record is not None
    record.trace = OF_A_TRACE if traced else None
    stages = stages_of(record)
    whole = stages[0]
    assert (whole.name, whole.parent, whole.begin_s) == ("request", None, 0.0)
    for index, stage in enumerate(stages[1:], 1):
        assert 0.0 <= stage.begin_s <= stage.end_s <= whole.end_s + 1e-4
        assert stage.parent is not None
        assert stage.parent < index
        around = stages[stage.parent]
        assert around.begin_s - 1e-4 <= stage.begin_s
        assert stage.end_s <= around.end_s + 1e-4
    return stages


def names(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages]


async def test_a_local_answer_is_queued_bound_begun_and_decoded() -> None:
    async with world() as w:
        stages = await told(w, request(w.clock, max_tokens=4))
    whole, queue, bind, prefill, decode = stages
    assert names(stages) == ["request", "queue", "bind", "prefill", "decode"]
    assert {stage.parent for stage in stages[1:]} == {0}
    assert queue.end_s == bind.begin_s
    assert bind.end_s == prefill.begin_s
    assert prefill.end_s == decode.begin_s
    assert decode.end_s == pytest.approx(whole.end_s, abs=1e-4)
    assert prefill.end_s == pytest.approx(whole.attributes["overspill.ttft_ms"] / 1e3, abs=1e-4)
    assert whole.attributes["overspill.outcome"] == "completed"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert (whole.kind, whole.span_id, whole.error) == ("server", 9, "")


async def test_what_goes_to_the_tier_above_lies_within_its_link() -> None:
    async with world() as w:
        stages = await told(w, request(w.clock, prompt_tokens=3000, max_tokens=4))
    assert names(stages) == ["request", "queue", "bind", "link", "prefill", "decode"]
    link = stages[3]
    assert (link.kind, link.parent, stages[4].parent, stages[5].parent) == ("client", 0, 3, 3)
    assert link.span_id == OF_A_TRACE.link_id(1)
    assert link.attributes["server.address"] == UPSTREAM
    assert link.attributes["overspill.link.rtt_ms"] == 20.0


async def test_who_had_to_wait_has_a_queue_as_long_as_the_wait() -> None:
    async with world(remote=False, ttft_slo_ms=600_000.0) as w:
        w.dispatcher.set_replicas([w.local])
        others = [asyncio.ensure_future(w.ask(max_tokens=24)) for _ in range(4)]
        await w.clock.settle()
        stages = await told(w, request(w.clock, max_tokens=4))
        await w.clock.run(asyncio.gather(*others))
    assert stages[1].name == "queue"
    assert stages[1].end_s - stages[1].begin_s > 0.2


async def test_a_failover_goes_through_the_stages_again_and_the_broken_ones_say_so() -> None:
    async with world() as w:
        w.local.faults = [("break", 2)]
        stages = await told(w, request(w.clock, max_tokens=8))
    assert names(stages)[:5] == ["request", "queue", "bind", "prefill", "decode"]
    assert stages[4].error == "replica_broken"
    assert "queue" in names(stages)[5:]
    assert names(stages)[-1] == "decode"
    assert stages[-1].error == stages[0].error == ""


async def test_an_attempt_that_never_began_has_no_decode() -> None:
    async with world() as w:
        w.local.faults = ["unreachable"]
        stages = await told(w, request(w.clock, max_tokens=8))
    assert names(stages)[1:5] == ["queue", "bind", "prefill", "queue"]
    assert stages[3].error == "replica_unreachable"


async def test_a_hedge_that_wins_ends_the_one_that_it_outran() -> None:
    async with world(hedge=HedgeSettings(enabled=True, budget=1.0), remote=True) as w:
        for _ in range(40):
            await w.clock.run(w.ask(max_tokens=4))
        w.local.faults = ["hang"]
        stages = await told(w, request(w.clock, max_tokens=4))
    outrun = [stage for stage in stages if any(name == "outrun" for _, name in stage.events)]
    assert outrun
    assert not any(stage.error for stage in stages)


async def test_who_was_refused_only_waited() -> None:
    async with world() as w:
        stages = await told(w, request(w.clock, prompt_tokens=9000))
    assert names(stages) == ["request", "queue"]
    assert (stages[0].attributes["overspill.outcome"], stages[0].error) == ("invalid", "")
    async with world(max_wait_ms=100.0) as w:
        for replica in w.all:
            replica.others = replica.slots
        stages = await told(w, request(w.clock, max_tokens=4))
    assert names(stages) == ["request", "queue"]
    assert stages[0].attributes["overspill.outcome"] == "unavailable"
    assert stages[0].error == "unavailable"
    assert stages[1].end_s == pytest.approx(0.1, abs=1e-3)


async def test_without_a_trace_there_are_stages_too() -> None:
    async with world() as w:
        stages = await told(w, request(w.clock, prompt_tokens=3000, max_tokens=4), traced=False)
    assert {stage.span_id for stage in stages} == {None}
