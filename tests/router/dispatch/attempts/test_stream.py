"""The chunks of one attempt: whatever its replica does, no reader waits longer than it said, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import structlog

from router.base.alarms import Alarms
from router.dispatch.attempts.stream import AttemptStream, Elapsed
from router.signals.in_flight import Attempt
from router.values.choice import Choice
from router.values.chunk import FinishReason, TokenChunk
from router.values.prediction import Prediction, TtftFeatures
from router.values.request import InferenceRequest
from router.values.situation import Candidate
from tests.support.clocks import VirtualClock
from tests.support.router_fakes import FakeReplica, info, request

SOON = Prediction(0.0, 0.1, 0.2, 0.01, 0.02, 0.3, 0.4, free=True)
CHOICE = Choice(Candidate(info(), SOON), "device-first", degraded=False)
WORK = TtftFeatures(prefill_tokens=1.0, network_s=0.0)
END = TokenChunk("", 0, finish_reason=FinishReason.STOP)


@contextlib.asynccontextmanager
async def stream_of(generate) -> AsyncIterator[tuple[VirtualClock, AttemptStream]]:
    clock = VirtualClock()
    replica = FakeReplica(info(), clock)
    replica.generate = generate
    async with Alarms(clock) as alarms:
        attempt = Attempt(replica, CHOICE, sent_at_s=0.0, work=WORK, prompt_tokens=1, expected_tokens=1)
        yield clock, AttemptStream(attempt, request(clock), clock, alarms)


async def read_all(stream: AttemptStream) -> list[str]:
    texts = []
    while True:
        chunk = await stream.next(float("inf"))
        texts.append(chunk.text)
        if chunk.finish_reason is not None:
            return texts


async def test_chunks_come_in_order_and_a_fast_replica_waits_for_its_reader() -> None:
    made = 0

    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        nonlocal made
        for index in range(500):
            made += 1
            yield TokenChunk(str(index))
        yield END

    async with stream_of(generate) as (clock, stream), stream:
        await clock.settle()
        assert made <= 100
        assert await clock.run(read_all(stream)) == [*map(str, range(500)), ""]


async def test_a_chunk_makes_no_task_and_no_timer() -> None:
    made = 0

    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for _index in range(200):
            await asyncio.sleep(0)
            yield TokenChunk("x")
        yield END

    def count_tasks(loop, coroutine, **options) -> asyncio.Task:
        nonlocal made
        made += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    async with stream_of(generate) as (_, stream):
        asyncio.get_running_loop().set_task_factory(count_tasks)
        try:
            async with stream:
                for _index in range(200):
                    await stream.next(5000.0)
                    assert len(stream._alarms._heap) == 1
        finally:
            asyncio.get_running_loop().set_task_factory(None)
        assert made <= 3, "the attempt's own, and what waits for the clock"


async def test_what_came_before_an_error_is_read_first() -> None:
    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk("a")
        raise ZeroDivisionError

    async with stream_of(generate) as (clock, stream), stream:
        await clock.settle()
        assert (await stream.next(2000.0)).text == "a"
        with pytest.raises(ZeroDivisionError):
            await stream.next(2000.0)


async def test_a_silent_replica_is_elapsed_and_may_still_go_on() -> None:
    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.Event().wait()
        yield END

    async with stream_of(generate) as (clock, stream), stream:
        for _ in range(2):
            with pytest.raises(Elapsed):
                await clock.run(stream.next(clock.now_s() + 2.0))


async def test_a_replica_that_ignores_its_cancellation_holds_nobody() -> None:
    let_go = asyncio.Event()

    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk("a")
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    async def read_one(stream: AttemptStream) -> str:
        async with stream:
            return (await stream.next(5000.0)).text

    async with stream_of(generate) as (clock, stream):
        began_s = clock.now_s()
        try:
            with structlog.testing.capture_logs() as logs:
                assert await clock.run(read_one(stream)) == "a"
            assert clock.now_s() - began_s < 10.0
            assert [log["log_level"] for log in logs] == ["error"]
        finally:
            let_go.set()  # a test that failed would wait for it for ever


async def test_a_reader_cancelled_in_the_turn_of_a_result_stays_cancelled() -> None:
    go = asyncio.Event()
    closed = []

    async def generate(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            await go.wait()
            yield TokenChunk("a")
            await asyncio.Event().wait()
        finally:
            closed.append(1)

    async def read(stream: AttemptStream) -> None:
        async with stream:
            await read_all(stream)

    async with stream_of(generate) as (clock, stream):
        reader = asyncio.ensure_future(read(stream))
        await clock.settle()
        go.set()
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await clock.run(asyncio.wait_for(reader, None))
        assert closed == [1]
