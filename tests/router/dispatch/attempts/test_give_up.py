"""An answer that can no longer keep its deadline gives its slot up, whoever reads it or does not, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from router.base.errors import DeadlineLost
from router.signals.in_flight import Attempt
from router.values.answer import Answer
from router.values.chunk import FinishReason
from router.values.request import InferenceRequest
from tests.support.router_fakes import World, answer, request, world


def only(w: World) -> Attempt:
    (attempts,) = w.dispatcher._signals.in_flight._by_replica.values()
    (attempt,) = attempts
    return attempt


def slow(w: World, slower: float = 10.0) -> None:
    """0.5 s for the prompt and 0.2 s a token, for ever."""
    w.local.slower, w.local.answer_tokens = slower, 10**6
    w.dispatcher.set_replicas([w.local])


def metric(w: World, name: str, **labels: str) -> float:
    return w.dispatcher.telemetry.registry.get_sample_value(name, labels) or 0.0


async def rest(running: Answer) -> tuple[str, FinishReason | None]:
    chunks = [chunk async for chunk in running.chunks]
    return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def ask_of(w: World, **wish: Any) -> InferenceRequest:
    return request(w.clock, **{"deadline_s": 5.0, "max_tokens": 100, "ignore_eos": True, **wish})


def says_so(w: World, ask: InferenceRequest, tokens: int) -> None:
    record = w.record(ask.request_id)
    assert (record["outcome"], record["error"], record["tokens"]) == ("degraded", None, tokens)
    assert [e["event"] for e in record["events"]] == ["sent", "first_token", "given_up", "finished"]
    assert metric(w, "overspill_given_up_total", began="yes") == 1
    labels = {"outcome": "degraded", "tier": "edge", "variant": "tiny-int8", "reason": "given-up"}
    assert metric(w, "overspill_requests_total", **labels) == 1
    assert w.dispatcher.breaker_states().get("local/tiny-int8") in {None, "closed"}
    w.nothing_is_held()


async def test_a_reader_that_waits_gets_the_text_so_far_at_once() -> None:
    async with world(remote=False) as w:
        slow(w)
        ask = ask_of(w)
        running = await w.clock.run(w.dispatcher.start(ask))
        reading = asyncio.ensure_future(rest(running))
        await w.clock.advance(1.1)
        attempt = only(w)
        assert attempt.ends_s == ask.accepted_at_s + 5.0
        assert attempt.give_up is not None
        assert attempt.give_up()
        await w.clock.settle()
        assert reading.done(), "no time passes"
        assert reading.result() == (answer(6), FinishReason.LENGTH)
        assert (running.route.degraded, running.route.reason) == (True, "given-up")
        assert not attempt.give_up(), "once"
        says_so(w, ask, 6)


@pytest.mark.interpreted
async def test_a_reader_that_is_away_loses_its_slot_all_the_same_and_gets_what_was_made() -> None:
    async with world(remote=False) as w:
        slow(w)
        ask = ask_of(w)
        running = await w.clock.run(w.dispatcher.start(ask))
        await w.clock.advance(1.1)
        freed = []
        real = w.dispatcher._binder.wake
        w.dispatcher._binder.wake = lambda replica_id=None: freed.append(replica_id) or real(replica_id)
        attempt = only(w)
        assert attempt.give_up is not None
        assert attempt.give_up()
        await w.clock.settle()
        assert len(w.dispatcher._signals.in_flight) == 0
        assert w.local.open == 0
        assert freed == ["local/tiny-int8"], "whoever waits is decided at once"
        await w.clock.advance(60.0)
        assert await w.clock.run(rest(running)) == (answer(6), FinishReason.LENGTH)
        says_so(w, ask, 6)


async def test_a_reader_that_leaves_after_that_holds_nothing() -> None:
    async with world(remote=False) as w:
        slow(w)
        running = await w.clock.run(w.dispatcher.start(ask_of(w)))
        attempt = only(w)
        assert attempt.give_up is not None
        attempt.give_up()
        await running.chunks.aclose()
        await w.clock.settle()
        w.nothing_is_held()


async def test_before_the_first_text_the_deadline_is_lost_with_a_time_to_come_back() -> None:
    async with world(remote=False) as w:
        slow(w, 60.0)
        ask = ask_of(w)
        reading = asyncio.ensure_future(w.read(ask))
        await w.clock.advance(1.0)
        attempt = only(w)
        assert attempt.give_up is not None
        assert attempt.give_up()
        await w.clock.settle()
        assert reading.done(), "no time passes"
        with pytest.raises(DeadlineLost, match="gave up its slot") as raised:
            await reading
        assert w.clock.now_s() - ask.accepted_at_s == pytest.approx(1.0)
        assert raised.value.retry_after_s > 0
        record = w.record(ask.request_id)
        assert record["outcome"] == "unavailable"
        assert [e["event"] for e in record["events"]] == ["sent", "given_up", "finished"]
        assert metric(w, "overspill_given_up_total", began="no") == 1
        assert len(w.local.sent) == 1, "nobody else tries it"
        w.nothing_is_held()


async def test_an_answer_that_is_whole_already_is_not_given_up() -> None:
    async with world(remote=False) as w:
        running = await w.clock.run(w.dispatcher.start(request(w.clock, deadline_s=60.0, max_tokens=8)))
        (attempt,) = [a for s in w.dispatcher._signals.in_flight._by_replica.values() for a in s]
        await w.clock.advance(5.0)
        assert attempt.give_up is not None
        assert not attempt.give_up()
        assert await w.clock.run(rest(running)) == (answer(8), FinishReason.LENGTH)
        assert running.route.reason != "given-up"
        w.nothing_is_held()


async def test_only_a_deadline_can_be_given_up_and_only_where_it_is_configured() -> None:
    async with world(remote=False) as w:
        slow(w)
        running = await w.clock.run(w.dispatcher.start(request(w.clock, max_tokens=50)))
        assert only(w).give_up is None
        assert only(w).ends_s == float("inf")
        await running.chunks.aclose()
    async with world(remote=False, give_up="off") as w:
        slow(w)
        running = await w.clock.run(w.dispatcher.start(ask_of(w)))
        assert only(w).give_up is None
        await running.chunks.aclose()


async def test_late_value_moves_the_time_when_nothing_is_left_to_lose() -> None:
    async with world(remote=False) as w:
        slow(w)
        ask = ask_of(w, late_s=3.0)
        running = await w.clock.run(w.dispatcher.start(ask))
        assert only(w).ends_s == ask.accepted_at_s + 8.0
        await running.chunks.aclose()


async def test_a_replica_that_does_not_let_go_keeps_neither_reader_nor_slot_for_ever() -> None:
    async with world(remote=False) as w:
        slow(w)
        real = w.local.generate

        async def stubborn(ask: InferenceRequest):
            async for chunk in real(ask):
                yield chunk
                try:
                    await w.clock.sleep(0.0)
                except asyncio.CancelledError:
                    await w.clock.sleep(1000.0)

        w.local.generate = stubborn
        running = await w.clock.run(w.dispatcher.start(ask_of(w)))
        await w.clock.advance(1.1)
        attempt = only(w)
        assert attempt.give_up is not None
        with structlog.testing.capture_logs():
            attempt.give_up()
            await w.clock.advance(6.0)
        assert len(w.dispatcher._signals.in_flight) == 0
        text, finish = await w.clock.run(rest(running))
        assert (text, finish) == (answer(6), FinishReason.LENGTH)


async def test_the_time_that_a_reader_is_away_is_no_pace() -> None:
    async with world(remote=False) as w:
        slow(w)
        running = await w.clock.run(w.dispatcher.start(ask_of(w)))
        await anext(running.chunks)
        await w.clock.run(anext(running.chunks))
        await w.clock.advance(1.5)
        attempt = only(w)
        assert attempt.tokens == 9, "what came while it was away, too"
        assert attempt.pace_s == pytest.approx(0.2)
        await running.chunks.aclose()


@pytest.mark.interpreted
async def test_what_was_given_up_teaches_the_pace_and_no_length() -> None:
    async with world(remote=False) as w:
        slow(w)
        finishes, lengths = [], []
        latency, length = w.dispatcher._signals.latency, w.dispatcher._signals.lengths
        real, real_length = latency.ended, length.ended
        latency.ended = lambda attempt, *more, whole, **told: (
            finishes.append((whole, attempt.pace_s)) or real(attempt, *more, whole=whole, **told)
        )
        length.ended = lambda watch, family, tokens, by_itself: (
            lengths.append((tokens, by_itself)) or real_length(watch, family, tokens, by_itself=by_itself)
        )
        running = await w.clock.run(w.dispatcher.start(ask_of(w, ignore_eos=False)))
        reading = asyncio.ensure_future(rest(running))
        await w.clock.advance(1.1)
        attempt = only(w)
        assert attempt.give_up is not None
        attempt.give_up()
        await w.clock.run(asyncio.wait_for(reading, None))
        ((whole, pace_s),) = finishes
        assert (whole, lengths) == (False, [(6, False)])
        assert pace_s == pytest.approx(0.2, rel=0.15)
