"""Whoever reads slowly keeps a slot no longer than its replica works, and teaches nothing that is not the replica's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import OverspillError
from router.values.answer import Answer
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.request import InferenceRequest
from tests.support.router_fakes import World, answer, request, world

LONG_S = 300.0


async def rest_of(running: Answer) -> tuple[str, int, FinishReason | None]:
    """Read the rest of an answer: its text, tokens and end."""
    text, tokens, finish = "", 0, None
    async for chunk in running.chunks:
        text, tokens, finish = text + chunk.text, tokens + chunk.tokens, chunk.finish_reason
    return text, tokens, finish


async def left_unread(w: World, ask: InferenceRequest) -> Answer:
    """Send a request, and read nothing of its answer for long."""
    running = await w.clock.run(w.dispatcher.start(ask))
    await w.clock.advance(LONG_S)
    return running


Generate = Callable[[InferenceRequest], AsyncGenerator[TokenChunk, None]]


def writes(tokens: int, **more: Any) -> tuple[Generate, list[int]]:
    """Return what generates so many tokens, and waits for nothing but its reader; and those that it has generated."""
    made: list[int] = []

    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for index in range(tokens):
            made.append(index)
            yield TokenChunk(answer(1, index), **more)
        yield TokenChunk("", 0, finish_reason=FinishReason.STOP)

    return generate, made


async def test_a_slot_is_free_when_its_replica_ends_and_not_when_its_reader_does() -> None:
    async with world(remote=False) as w:
        w.local.slots = 1
        w.local._slot = asyncio.Semaphore(1)
        w.dispatcher.set_replicas([w.local])
        ask = request(w.clock, max_tokens=20, ignore_eos=True, deadline_s=30.0)
        running = await left_unread(w, ask)
        assert len(w.dispatcher._signals.in_flight) == 0
        assert (await w.clock.run(w.ask(max_tokens=4)))[1] == answer(4), "the one slot serves the next"
        assert await w.clock.run(rest_of(running)) == (answer(20), 20, FinishReason.LENGTH)
        w.nothing_is_held()
        record = w.record(ask.request_id)
        assert (record["outcome"], record["tokens"], record["kept"]) == ("completed", 20, {"deadline": True})
        assert record["finish_ms"] < 1000, "how long the replica took"
        assert running.used().completion_tokens == 20


async def test_it_is_told_that_nobody_works_on_it_any_more_before_it_is_read() -> None:
    async with world(remote=False) as w:
        told: list[str] = []
        w.dispatcher.tell_of_requests(lambda _: told.append("came"), lambda ended: told.append(f"{ended.finish_s:.1f}"))
        running = await w.clock.run(w.dispatcher.start(request(w.clock, max_tokens=20, ignore_eos=True)))
        running.when_computed(lambda: told.append("computed"))
        assert told == ["came"]
        await w.clock.advance(LONG_S)
        assert told == ["came", "0.4", "computed"]
        await w.clock.run(rest_of(running))
        assert told == ["came", "0.4", "computed"], "each once"
        running.when_computed(lambda: told.append("at once"))
        assert told[3:] == ["at once"]


@pytest.mark.parametrize("tokens", [64, 65, 1000, 30_000])
async def test_long_answers_are_whole_however_late_they_are_read(tokens: int) -> None:
    async with world(remote=False) as w:
        w.local.info = replace(w.local.info, context_tokens=100_000)
        w.dispatcher.set_replicas([w.local])
        w.local.generate, _ = writes(tokens)
        ask = request(w.clock)
        running = await left_unread(w, ask)
        assert len(w.dispatcher._signals.in_flight) == 0
        assert await w.clock.run(rest_of(running)) == (answer(tokens), tokens, FinishReason.STOP)
        assert w.record(ask.request_id)["tokens"] == tokens


@pytest.mark.parametrize(
    ("more", "tokens", "most_chars"),
    [({}, 200_000, 65 * 4096), ({"logprobs": (TokenLogprob("x", -1.0, b"x"),)}, 2000, 70 * 8)],
    ids=["text", "what cannot be joined"],
)
async def test_what_nobody_reads_is_bounded_and_a_replica_that_waits_teaches_no_times(
    more: dict[str, Any], tokens: int, most_chars: int
) -> None:
    async with world(remote=False) as w:
        w.local.info = replace(w.local.info, context_tokens=1_000_000)
        w.dispatcher.set_replicas([w.local])
        w.local.generate, made = writes(tokens, **more)
        running = await left_unread(w, request(w.clock))
        assert len(answer(len(made))) <= most_chars
        (attempt,) = w.dispatcher._signals.in_flight
        assert attempt.held_back
        assert attempt.pace_s is None
        (device,) = w.dispatcher._signals.latency._devices.values()
        before = device.finish_high.log(0)
        assert (await w.clock.run(rest_of(running)))[:2] == (answer(tokens), tokens)
        assert device.finish_high.log(0) == before
        w.nothing_is_held()


@pytest.mark.parametrize("fault", [("stall", 5), None], ids=["silent", "waits for its reader"])
async def test_at_its_deadline_a_slot_is_free_whatever_its_replica_and_its_reader_do(
    fault: tuple[str, int] | None,
) -> None:
    """One that was silent, or waited for its reader, kept it until the client was taken for gone."""
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        if fault is None:
            w.local.generate, _ = writes(150, logprobs=(TokenLogprob("x", -1.0, b"x"),))
        else:
            w.local.faults = [fault]
        ask = request(w.clock, max_tokens=150, ignore_eos=True, deadline_s=10.0)
        running = await w.clock.run(w.dispatcher.start(ask))
        await w.clock.advance(9.0)
        assert len(w.dispatcher._signals.in_flight) == 1
        await w.clock.advance(3.0)
        assert len(w.dispatcher._signals.in_flight) == 0
        text, tokens, finish = await w.clock.run(rest_of(running))
        assert finish is FinishReason.LENGTH
        assert 0 < tokens < 150
        assert text == answer(tokens)
        w.nothing_is_held()
        assert w.record(ask.request_id)["outcome"] == "degraded"


async def test_who_leaves_with_text_unread_is_told_as_gone_and_pays_for_what_was_made() -> None:
    async with world(remote=False) as w:
        ask = request(w.clock, max_tokens=20, ignore_eos=True)
        running = await left_unread(w, ask)
        await w.clock.run(running.chunks.aclose())
        w.nothing_is_held()
        record = w.record(ask.request_id)
        assert (record["outcome"], record["tokens"]) == ("cancelled", 20)
        assert running.used().completion_tokens == 20


async def test_who_leaves_while_it_is_made_ends_the_work() -> None:
    async with world(remote=False) as w:
        ask = request(w.clock, max_tokens=2000, ignore_eos=True)
        running = await w.clock.run(w.dispatcher.start(ask))
        await w.clock.advance(2.0)
        assert w.local.open + w.small.open == 1
        await w.clock.run(running.chunks.aclose())
        w.nothing_is_held()
        assert 0 < w.record(ask.request_id)["tokens"] < 2000


@pytest.mark.parametrize("fault", [("break", 5), ("silent", 5), ("empty", 5), ("stall", 5)])
async def test_what_breaks_while_nobody_reads_frees_its_slot_and_is_finished_elsewhere(fault: tuple[str, int]) -> None:
    async with world() as w:
        w.local.faults = [fault]
        ask = request(w.clock, max_tokens=20, ignore_eos=True)
        running = await left_unread(w, ask)
        assert len(w.dispatcher._signals.in_flight) == 0
        text, tokens, _ = await w.clock.run(rest_of(running))
        assert (text, tokens) == (answer(20), 20)
        record = w.record(ask.request_id)
        assert [e["event"] for e in record["events"] if e["event"] == "failover"] == ["failover"]
        w.nothing_is_held()


async def test_a_deadline_that_passes_while_nobody_reads_frees_the_slot() -> None:
    async with world(remote=False) as w:
        w.local.slower = 10.0
        ask = request(w.clock, deadline_s=5.0, ignore_eos=True)
        w.dispatcher.set_replicas([w.local])
        running = await left_unread(w, ask)
        assert w.local.open == 0
        text, tokens, finish = await w.clock.run(rest_of(running))
        assert (text, finish) == (answer(tokens), FinishReason.LENGTH)
        assert running.route.degraded
        record = w.record(ask.request_id)
        assert (record["outcome"], record["tokens"]) == ("degraded", tokens)
        assert record["finish_ms"] == pytest.approx(5000, abs=400)
        assert [e["event"] for e in record["events"]] == ["sent", "first_token", "deadline", "finished"]
        w.nothing_is_held()


async def test_a_replica_that_ignores_its_cap_is_ended_there_while_nobody_reads() -> None:
    async with world(remote=False) as w:
        w.dispatcher.set_replicas([w.local])
        w.local.generate, _ = writes(50)
        running = await left_unread(w, request(w.clock, max_tokens=10))
        assert len(w.dispatcher._signals.in_flight) == 0
        assert await w.clock.run(rest_of(running)) == (answer(10), 10, FinishReason.LENGTH)


async def test_slow_readers_make_no_replica_look_slow() -> None:
    """The same requests, read at once and read after long: the same is believed of the replica afterwards."""
    believed = []
    for slowly in (False, True):
        async with world(remote=False) as w:
            w.dispatcher.set_replicas([w.local])
            w.local.slower = 1.7
            for _ in range(30):
                ask = request(w.clock, max_tokens=40, ignore_eos=True, deadline_s=60.0)
                running = await w.clock.run(w.dispatcher.start(ask))
                await w.clock.advance(LONG_S if slowly else 0.0)
                await w.clock.run(rest_of(running))
                await w.clock.advance(0.0 if slowly else LONG_S)
            ask = request(w.clock, max_tokens=40, ignore_eos=True, deadline_s=60.0)
            await w.clock.run(w.read(ask))
            record = w.dispatcher.decision(ask.request_id)
            believed.append((record.promised_ttft_s, record.promised_finish_s, record.promised_finish_high_s))
            assert record.promised_finish_high_s < 4.0
    assert believed[1] == pytest.approx(believed[0], rel=0.05)


@given(
    fault=st.one_of(st.none(), st.tuples(st.sampled_from(["break", "empty", "silent"]), st.integers(0, 12))),
    naps=st.lists(st.tuples(st.integers(1, 90), st.floats(0.0, 20.0)), max_size=6),
    tokens=st.integers(1, 90),
    deadline_s=st.one_of(st.none(), st.floats(0.3, 6.0)),
)
async def test_however_it_is_read_nothing_is_lost_doubled_or_kept(
    fault: tuple[str, int] | None, naps: list[tuple[int, float]], tokens: int, deadline_s: float | None
) -> None:
    async with world(stall_timeout_ms=500.0) as w:
        w.local.faults = [fault]
        ask, sleeps = request(w.clock, max_tokens=tokens, ignore_eos=True, deadline_s=deadline_s), dict(naps)
        text, read = "", 0

        async def follow() -> None:
            nonlocal text, read
            running = await w.dispatcher.start(ask)
            async for chunk in running.chunks:
                text, read = text + chunk.text, read + 1
                await w.clock.sleep(sleeps.get(read, 0.0))

        try:
            await w.clock.run(follow())
        except OverspillError:
            assert deadline_s is not None
        made = len(text.split())
        assert text == answer(made)
        assert made == w.record(ask.request_id)["tokens"]
        assert made == tokens or deadline_s is not None
        w.nothing_is_held()
