"""Crack 6: no replica can stream more than it was asked for, whatever it says of how much that is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import orjson
import pytest

from router.values.chunk import FinishReason, TokenChunk
from router.values.replica import SpeedPrior
from router.values.request import InferenceRequest
from tests.support.router_fakes import request, word, world

Chunks = Callable[[], AsyncGenerator[TokenChunk, None]]


class Overrunning:
    """Stands in for the `generate` of a replica; notes when it was closed."""

    def __init__(self, chunk: Callable[[int], TokenChunk], clock) -> None:
        self.chunk = chunk
        self.clock = clock
        self.closed = False
        self.made = 0

    async def __call__(self, _: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            while self.made < 100_000:
                await self.clock.sleep(0.01)
                yield self.chunk(self.made)
                self.made += 1
        finally:
            self.closed = True


async def read(w, ask: InferenceRequest) -> list[TokenChunk]:
    running = await w.dispatcher.start(ask)
    return [chunk async for chunk in running.chunks]


LYING = {
    "goes on": (lambda index: TokenChunk(word(index)), "".join(map(word, range(8)))),
    "says that nothing counts": (lambda _: TokenChunk("x" * 100, 0), "x" * 8 * 256),
    "has endless tokens": (lambda _: TokenChunk("x" * 100_000), "x" * 8 * 256),
    "counts in thousands": (lambda _: TokenChunk("abcdefgh" * 4, 16), "abcdefgh" * 2),
    "counts beyond 64 bits": (lambda _: TokenChunk("hello", 10**29), ""),
    "sends empty tokens": (lambda _: TokenChunk("", 1), ""),
    "has text after its last token": (lambda index: TokenChunk("x", 8 if index == 0 else 0), "x"),
}


@pytest.mark.parametrize(("chunk", "text"), LYING.values(), ids=LYING.keys())
async def test_a_replica_that_ignores_max_tokens_is_ended_at_it(chunk: Callable[[int], TokenChunk], text: str) -> None:
    async with world(remote=False) as w:
        w.local.generate = lying = Overrunning(chunk, w.clock)
        expected = w.dispatcher._signals.lengths.watch(request(w.clock), "tiny").curve.expected()
        ask = request(w.clock, max_tokens=8, model="tiny-int8")
        chunks = await w.clock.run(read(w, ask))
        assert "".join(chunk.text for chunk in chunks) == text
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert sum(chunk.tokens for chunk in chunks) <= 8
        assert lying.closed
        record = w.record(ask.request_id)
        assert "cap_exceeded" in [event["event"] for event in record["events"]]
        assert record["tokens"] <= 8
        orjson.dumps(record)
        learnt = w.dispatcher._signals.lengths.watch(request(w.clock), "tiny").curve.expected()
        assert expected <= learnt < 1.2 * expected, "that it was longer, at most"
        w.nothing_is_held()


async def test_without_a_cap_the_window_is_the_cap() -> None:
    async with world(remote=False) as w:
        w.local.generate = lying = Overrunning(lambda index: TokenChunk(word(index)), w.clock)
        chunks = await w.clock.run(read(w, request(w.clock, prompt_tokens=2000, model="tiny-int8")))
        assert sum(chunk.tokens for chunk in chunks) == 2048 - 2000
        assert lying.closed


@pytest.mark.parametrize("policy", ["slo-utility", "quality-in-objective", "local-first"])
@pytest.mark.parametrize("wish", [{}, {"deadline_s": 20.0}, {"ttft_s": 9.0, "tpot_s": 1.0}])
async def test_without_a_cap_it_goes_where_the_window_holds_the_answer(policy: str, wish: dict[str, float]) -> None:
    async with world(policy=policy) as w:
        w.local.info = replace(w.local.info, prior=SpeedPrior(20_000.0, 200.0, 0.1, "test"))
        for prompt_tokens, servers in ((200, [1, 0, 0]), (2040, [1, 0, 1])):
            chunks = await w.clock.run(read(w, request(w.clock, prompt_tokens=prompt_tokens, **wish)))
            assert [len(replica.sent) for replica in (w.local, w.small, w.cloud)] == servers
            assert sum(chunk.tokens for chunk in chunks) == w.cloud.answer_tokens > 2048 - 2040
    async with world(policy=policy, remote=False) as w:
        chunks = await w.clock.run(read(w, request(w.clock, prompt_tokens=2040, **wish)))
        assert sum(chunk.tokens for chunk in chunks) == 2048 - 2040, "rather cut than not at all"


@pytest.mark.parametrize("reason", FinishReason)
async def test_an_answer_that_ends_at_its_cap_keeps_its_reason(reason: FinishReason) -> None:
    async def exact(_: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for index in range(8):
            yield TokenChunk(word(index))
        yield TokenChunk("held", 0, finish_reason=reason)

    async with world(remote=False) as w:
        w.local.generate = exact
        ask = request(w.clock, max_tokens=8, model="tiny-int8")
        chunks = await w.clock.run(read(w, ask))
        assert (chunks[-1].text, chunks[-1].finish_reason) == ("held", reason)
        assert "cap_exceeded" not in [event["event"] for event in w.record(ask.request_id)["events"]]
