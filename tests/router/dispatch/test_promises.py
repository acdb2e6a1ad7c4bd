"""Whether promises were kept: a flag in the decision record and a counter, for what callers asked for themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.base.errors import OverspillError
from tests.support.router_fakes import World, request, world

EVERYTHING = {"ttft_s": 1.0, "tpot_s": 0.1, "deadline_s": 5.0}


def counted(w: World) -> dict[str, float]:
    families = w.dispatcher.telemetry.registry.collect()
    samples = [s for family in families for s in family.samples if s.name == "overspill_promises_total"]
    return {f"{s.labels['promise']} {s.labels['kept']}": s.value for s in samples if s.value}


async def kept(w: World, **wish: Any) -> dict[str, bool]:
    ask = request(w.clock, **wish)
    try:
        await w.clock.run(w.read(ask))
    except OverspillError as error:
        assert error.message  # noqa: PT017 - refused is one of the ways to end
    flags: dict[str, bool] = w.record(ask.request_id)["kept"]
    return flags


async def test_a_promise_that_nobody_asked_for_is_not_counted():
    async with world() as w:
        assert await kept(w, max_tokens=8) == {}
        assert counted(w) == {}


async def test_promises_that_were_kept():
    async with world() as w:
        assert await kept(w, max_tokens=8, **EVERYTHING) == {"ttft": True, "tpot": True, "deadline": True}
        assert await kept(w, max_tokens=1, tpot_s=0.1) == {"tpot": True}, "one token has no pace to miss"
        assert counted(w) == {"ttft yes": 1, "tpot yes": 2, "deadline yes": 1}


async def test_promises_that_were_missed():
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.slower = 30.0
        flags = await kept(w, max_tokens=8, ttft_s=1.0, tpot_s=0.1)
        assert flags == {"ttft": False, "tpot": False}
        assert counted(w) == {"ttft no": 1, "tpot no": 1}


async def test_an_answer_that_was_cut_at_its_deadline_has_kept_it():
    async with world(remote=False) as w:
        w.local.answer_tokens = w.small.answer_tokens = 10**6
        w.local.slower = 5.0
        assert await kept(w, deadline_s=3.0) == {"deadline": True}


async def test_an_answer_that_broke_and_was_finished_late_has_not():
    async with world(stall_timeout_ms=1000.0) as w:
        w.local.faults = [("stall", 5)]
        assert await kept(w, max_tokens=20, ttft_s=1.0, deadline_s=1.3) == {"ttft": True, "deadline": False}


async def test_what_is_refused_or_breaks_is_a_promise_that_was_not_kept():
    async with world(remote=False) as w:
        for replica in (w.local, w.small):
            replica.faults = [("break", 3)] * 4
        assert await kept(w, max_tokens=20, **EVERYTHING) == {"ttft": True, "tpot": False, "deadline": False}
        w.local.available = w.small.available = False
        w.dispatcher.capacity_changed()
        assert await kept(w, **EVERYTHING) == {"ttft": False, "tpot": False, "deadline": False}


async def test_what_nobody_could_serve_is_no_broken_promise():
    async with world() as w:
        assert await kept(w, prompt_tokens=9000, **EVERYTHING) == {}


@pytest.mark.parametrize(
    ("after_s", "flags"),
    [(0.01, {}), (0.2, {"ttft": True}), (1.0, {"ttft": True, "deadline": False})],
    ids=["before text", "in the middle", "after the deadline of what was continued"],
)
async def test_of_a_caller_that_left_only_what_is_sure_counts(after_s: float, flags: dict[str, bool]):
    async with world(stall_timeout_ms=500.0, policy="quality-in-objective") as w:
        w.local.faults = [("stall", 4)]
        w.cloud.slower = 10.0
        ask = request(w.clock, max_tokens=20, ttft_s=1.0, deadline_s=0.8, tpot_s=0.1)
        work = asyncio.ensure_future(w.read(ask))
        await w.clock.advance(after_s)
        work.cancel()
        await w.clock.run(asyncio.wait_for(asyncio.gather(work, return_exceptions=True), None))
        record = w.record(ask.request_id)
        assert (record["outcome"], record["kept"]) == ("cancelled", flags)
