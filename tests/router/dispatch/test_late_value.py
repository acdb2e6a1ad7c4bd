"""Value after the deadline falls over a time that the caller says: the answer goes on until none is left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.base.errors import DeadlineLost
from router.upstream.exchange.call import remaining
from router.values.chunk import FinishReason
from router.values.prompt import TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.router_fakes import FakeReplica, World, answer, info, request, world


def test_value_falls_linearly_from_the_deadline_on() -> None:
    promised = Objective(deadline_s=2.0, late_s=1.0)
    assert [promised.value_at(s) for s in (0.0, 2.0, 2.25, 2.5, 3.0, 9.0)] == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert [Objective(deadline_s=2.0).value_at(s) for s in (2.0, 2.001)] == [1.0, 0.0]
    assert Objective().value_at(1e9) == 1.0
    assert (promised.ends_s, Objective(deadline_s=2.0).ends_s, Objective().ends_s) == (3.0, 2.0, None)


async def ends(w: World, ask: InferenceRequest) -> tuple[str, FinishReason | None, float]:
    running = await w.dispatcher.start(ask)
    chunks = [chunk async for chunk in running.chunks]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason, w.clock.now_s() - ask.accepted_at_s


def slow(w: World, slower: float = 10.0) -> FakeReplica:
    w.local.slower = slower
    w.local.answer_tokens = 10**6
    w.dispatcher.set_replicas([w.local])
    return w.local


async def test_an_answer_goes_on_past_its_deadline_while_it_has_value() -> None:
    async with world(remote=False) as w:
        slow(w)
        ask = request(w.clock, deadline_s=5.0, late_s=2.0, max_tokens=100, ignore_eos=True)
        text, finish, took_s = await w.clock.run(ends(w, ask))
        assert took_s == pytest.approx(7.0)
        assert (text, finish) == (answer(32), FinishReason.LENGTH)
        record = w.record(ask.request_id)
        assert (record["outcome"], record["kept"]) == ("degraded", {"deadline": False})
        assert record["objective"]["late_value_ms"] == 2000.0
        w.nothing_is_held()


async def test_no_text_is_lost_only_when_no_value_is_left() -> None:
    async with world(remote=False) as w:
        slow(w, 100.0)
        ask = request(w.clock, deadline_s=2.0, late_s=1.5)
        with pytest.raises(DeadlineLost, match="2 s"):
            await w.clock.run(w.read(ask))
        assert w.clock.now_s() - ask.accepted_at_s == pytest.approx(3.5)


@pytest.mark.interpreted
async def test_a_request_may_wait_for_as_long_as_its_answer_would_have_value() -> None:
    async with world(remote=False) as w:
        waits = []
        real = w.dispatcher._binder.bind
        w.dispatcher._binder.bind = lambda pending, record: waits.append(pending.wait_until_s) or real(pending, record)
        ask = request(w.clock, deadline_s=6.0, late_s=3.0)
        await w.clock.run(w.read(ask))
        assert waits == [ask.accepted_at_s + 9.0]


@pytest.mark.parametrize("wish", [{}, {"shorten": True}], ids=["as asked", "shorter allowed"])
async def test_an_overloaded_tier_caps_only_who_allows_it(wish: dict[str, Any]) -> None:
    async with world(remote=False, max_queue=8, overload_enter=0.25, expected_answer_tokens=20) as w:
        w.local.answer_tokens = 100
        w.dispatcher.set_replicas([w.local])
        asks = [request(w.clock, **wish) for _ in range(8)]
        ended = await w.clock.run(asyncio.gather(*(ends(w, ask) for ask in asks)))
        lengths = {len(text.split()) for text, _, _ in ended}
        assert lengths == ({64, 100} if wish else {100})


async def test_an_upstream_gets_what_is_left_of_both() -> None:
    objective = Objective(deadline_s=5.0, late_s=3.0, shorten=True)
    ask = InferenceRequest("r", "tiny", TextPrompt("one two three"), SamplingParams(), objective, 3, 100.0)
    left = remaining(ask, 104.0, 0.5, "cloud")
    assert (left.deadline_s, left.late_s, left.shorten) == (pytest.approx(0.5), 3.0, True)
    late = remaining(ask, 106.0, 0.5, "cloud")
    assert late.deadline_s is not None
    assert 0 < late.deadline_s <= 0.001
    assert late.deadline_s + (late.late_s or 0) == pytest.approx(1.5)
    with pytest.raises(DeadlineLost):
        remaining(ask, 108.0, 0.5, "cloud")


async def test_a_rest_after_a_break_is_finished_whatever_it_is_worth() -> None:
    async with world() as w:
        w.local.faults = [("break", 5)]
        w.dispatcher.set_replicas([w.local, FakeReplica(info("fp32", remote=True), w.clock, slower=100.0)])
        text, _, _ = await w.clock.run(ends(w, request(w.clock, max_tokens=20, deadline_s=2.0, late_s=1.0)))
        assert text == answer(20)
