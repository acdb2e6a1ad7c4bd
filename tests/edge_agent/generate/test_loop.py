"""The loop on a fake runtime: joining, leaving, cancelling, failing."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edge_agent.generate.batcher import BatchLimits, Sequence
from edge_agent.generate.logprobs import Logprobs
from edge_agent.generate.loop import GenerationLoop
from edge_agent.generate.request import Generation
from edge_agent.generate.sampling import Sampler
from edge_agent.generate.turn import Turn
from router.base.errors import OverspillError, ReplicaBroken, ReplicaUnreachable
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import DrawnToken, TokenLogprob
from router.values.sampling import SamplingParams
from tests.support.fake_runtime import EOS, VOCAB, FakeRuntime, FakeText, answer, texts
from tests.support.waiting import until

LIMITS = BatchLimits(slots=4, prefill_chunk_tokens=16, decode_steps_per_chunk=2)


@asynccontextmanager
async def running(
    *runtimes: FakeRuntime, limits: BatchLimits = LIMITS, keep_kv: bool = False
) -> AsyncIterator[GenerationLoop]:
    """A loop that loads the given runtimes one after the other."""
    supply = iter(runtimes)
    loop = GenerationLoop("fake", lambda: next(supply), limits, Turn(), keep_kv=keep_kv)
    try:
        yield loop
    finally:
        for runtime in runtimes:
            if runtime.gate is not None:
                runtime.gate.release(10_000)
        await loop.close()


def request(prompt: list[int], max_tokens: int, **extra: Any) -> Generation:
    sampler = Sampler(SamplingParams(temperature=0.0), prompt, VOCAB)
    sequence = Sequence(list(prompt), max_tokens, sampler, **extra)
    return Generation("r", sequence, FakeText(), frozenset({EOS}))


async def collect(generation: Generation) -> tuple[str, TokenChunk]:
    text = ""
    while True:
        item = await asyncio.wait_for(generation.inbox.get(), 60)
        if isinstance(item, OverspillError):
            raise item
        text += item.text
        if item.finish_reason is not None:
            return text, item


async def first(generation: Generation) -> TokenChunk:
    item = await asyncio.wait_for(generation.inbox.get(), 60)
    assert isinstance(item, TokenChunk)
    return item


async def test_a_prompt_in_chunks_answers_like_the_plain_run() -> None:
    prompt = list(range(3, 60))
    runtime = FakeRuntime()
    async with running(runtime) as loop:
        generation = request(prompt, 9)
        loop.submit(generation)
        text, last = await collect(generation)
    assert text == texts(answer(prompt, 9))
    assert last.finish_reason is FinishReason.LENGTH
    assert last.prompt_tokens == len(prompt)
    assert [step[0][1] for step in runtime.steps[:4]] == [16, 16, 16, 9]
    assert runtime.closed
    assert not runtime.sequences


async def test_sequences_join_and_leave_without_touching_each_other() -> None:
    runtime = FakeRuntime()
    jobs = [(list(range(3 + n, 3 + n + 5 * n + 1)), 9 + 7 * n % 11) for n in range(12)]
    async with running(runtime) as loop:
        generations = [request(prompt, count) for prompt, count in jobs]
        for generation in generations:
            loop.submit(generation)
        results = await asyncio.gather(*map(collect, generations))
        assert not list(loop.live)
    for (prompt, count), (text, _) in zip(jobs, results, strict=True):
        assert text == texts(answer(prompt, count))
    assert max(len(step) for step in runtime.steps) == 4


async def test_a_long_prompt_does_not_stop_running_answers() -> None:
    runtime = FakeRuntime(context_tokens=4096, gate=threading.Semaphore(1))
    async with running(runtime) as loop:
        talker, newcomer = request([5], 40), request(list(range(3, 90)) * 3, 1)
        loop.submit(talker)
        await first(talker)
        loop.submit(newcomer)
        runtime.gate.release(1000)
        await asyncio.gather(collect(talker), collect(newcomer))
    sizes = [step[0][1] for step in runtime.steps]
    chunks = [index for index, size in enumerate(sizes) if size > 1]
    gaps = {later - earlier for earlier, later in itertools.pairwise(chunks)}
    assert gaps == {1 + LIMITS.decode_steps_per_chunk}


async def test_higher_priority_is_admitted_first_and_equals_in_order() -> None:
    runtime = FakeRuntime(slots=1, gate=threading.Semaphore(1))
    async with running(runtime, limits=BatchLimits(1, 16, 2)) as loop:
        held = request([9], 30)
        loop.submit(held)
        await first(held)
        waiting = [
            request([number], 2, priority=priority) for number, priority in ((11, -1), (12, 0), (13, 0), (14, 5))
        ]
        for generation in waiting:
            loop.submit(generation)
        runtime.gate.release(1000)
        await asyncio.gather(collect(held), *map(collect, waiting))
    assert runtime.prompts == [[9], [14], [12], [13], [11]]


async def test_cancelling_frees_the_slot_at_the_next_step() -> None:
    runtime = FakeRuntime(slots=1)
    async with running(runtime, limits=BatchLimits(1, 16, 2)) as loop:
        endless, patient = request([5], 100_000), request([6], 3)
        loop.submit(endless)
        await first(endless)
        loop.submit(patient)
        assert loop.waiting == 1
        loop.cancel(endless)
        text, _ = await collect(patient)
        assert text == texts(answer([6], 3))
        assert not list(loop.live)
        loop.cancel(patient)  # a finished request is left alone


async def test_cancelling_a_waiting_request_never_computes_it() -> None:
    runtime = FakeRuntime(slots=1, gate=threading.Semaphore(1))
    async with running(runtime, limits=BatchLimits(1, 16, 2)) as loop:
        busy, waiting = request([5], 60), request([6], 3)
        loop.submit(busy)
        await first(busy)
        loop.submit(waiting)
        loop.cancel(waiting)
        runtime.gate.release(1000)
        await collect(busy)
    assert runtime.opened == 1


async def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    runtime = FakeRuntime(fail_on={1})
    async with running(runtime) as loop:
        unlucky, lucky = request([5], 4), request([6], 4)
        loop.submit(unlucky)
        with pytest.raises(ReplicaUnreachable, match="fell over"):
            await collect(unlucky)
        loop.submit(lucky)
        text, _ = await collect(lucky)
    assert text == texts(answer([6], 4))
    assert loop.counters.failed_steps == 1


async def test_a_failure_after_the_first_token_is_a_broken_stream() -> None:
    runtime = FakeRuntime(fail_on={3})
    async with running(runtime) as loop:
        generation = request([5], 9)
        loop.submit(generation)
        with pytest.raises(ReplicaBroken):
            await collect(generation)


async def test_repeated_failures_load_the_model_anew() -> None:
    broken, fresh = FakeRuntime(fail_on=set(range(1, 100))), FakeRuntime()
    async with running(broken, fresh) as loop:
        for _ in range(3):
            generation = request([5], 2)
            loop.submit(generation)
            with pytest.raises(ReplicaUnreachable):
                await collect(generation)
        generation = request([5], 2)
        loop.submit(generation)
        assert (await collect(generation))[0] == texts(answer([5], 2))
        assert broken.closed
        assert loop.counters.loads == 2


async def test_a_model_that_cannot_be_loaded_refuses_and_rests() -> None:
    def nothing() -> FakeRuntime:
        raise ReplicaUnreachable("model.onnx is gone")

    loop = GenerationLoop("fake", nothing, LIMITS, Turn())
    with pytest.raises(ReplicaUnreachable, match="is gone"):
        await loop.load()
    assert loop.resting
    generation = request([5], 2)
    loop.submit(generation)
    with pytest.raises(ReplicaUnreachable, match="is gone"):
        await collect(generation)
    await loop.close()


async def test_end_of_turn_stops_and_is_counted() -> None:
    class Ending(FakeRuntime):
        def forward(self, batch):
            logits = super().forward(batch)
            if len(self.steps) == 3:
                logits[:, EOS] = 99
            return logits

    async with running(Ending()) as loop:
        generation = request([5], 50)
        loop.submit(generation)
        text, last = await collect(generation)
    assert last.finish_reason is FinishReason.STOP
    assert text == texts(answer([5], 2))
    assert len(generation.sequence.generated) == 3


async def test_closing_ends_running_requests_as_broken() -> None:
    runtime = FakeRuntime()
    async with running(runtime) as loop:
        generation = request([5], 10**9)
        loop.submit(generation)
        await first(generation)
        await loop.close()
        with pytest.raises(ReplicaBroken, match="shutting down"):
            await collect(generation)
    assert runtime.closed


async def test_closing_does_not_wait_for_a_load_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.generate.loop._JOIN_S", 0.01)
    runtime, loading, gate = FakeRuntime(), asyncio.Event(), threading.Event()
    here = asyncio.get_running_loop()

    def slow() -> FakeRuntime:
        here.call_soon_threadsafe(loading.set)
        assert gate.wait(30)
        return runtime

    loop = GenerationLoop("fake", slow, LIMITS, Turn())
    load = asyncio.create_task(loop.load())
    await loading.wait()
    await loop.close()
    assert not runtime.closed
    gate.set()
    await asyncio.wait({load})
    load.exception()  # whoever waited for it hears of the end, one way or the other
    await until(lambda: runtime.closed and not loop._thread.is_alive())


async def test_worthless_logits_fail_one_request_only() -> None:
    class Nan(FakeRuntime):
        def forward(self, batch):
            logits = super().forward(batch)
            for index, item in enumerate(batch):
                if self.sequences[item.sequence][0] == 13 and item.want_logits:
                    logits[index] = float("nan")
            return logits

    async with running(Nan()) as loop:
        sick, well = request([13], 5), request([5], 5)
        loop.submit(sick)
        loop.submit(well)
        with pytest.raises(ReplicaUnreachable, match="no usable output"):
            await collect(sick)
        assert (await collect(well))[0] == texts(answer([5], 5))


async def test_an_idle_model_is_unloaded_and_comes_back() -> None:
    one, two = FakeRuntime(), FakeRuntime()
    supply = iter((one, two))
    loop = GenerationLoop("fake", lambda: next(supply), LIMITS, Turn(), unload_idle_s=0.01)
    for runtime in (one, two):
        generation = request([5], 3)
        loop.submit(generation)
        assert (await collect(generation))[0] == texts(answer([5], 3))
        await until(lambda runtime=runtime: runtime.closed)
        assert loop.runtime is None
    await loop.close()


async def test_an_idle_loop_gives_memory_back() -> None:
    runtime = FakeRuntime()
    async with running(runtime) as loop:
        generation = request([5], 2)
        loop.submit(generation)
        await collect(generation)
        await until(lambda: runtime.released)
        assert runtime.released == 1


class FakeLine:
    """Tells each token at once, as `<id>`."""

    def __init__(self) -> None:
        self.waiting: list[DrawnToken] = []

    def push(self, drawn: Iterable[DrawnToken]) -> None:
        self.waiting += drawn

    def shown(self, text: str, *, whole: bool = False) -> tuple[TokenLogprob, ...]:
        told, self.waiting = self.told(self.waiting), []
        return told

    def told(self, drawn: Iterable[DrawnToken]) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(f"<{one.token_id}>", one.logprob) for one in drawn)


@pytest.mark.parametrize("length", [1, 2, 9, 30])
async def test_a_scored_prompt_is_fed_from_its_beginning_and_told_with_the_first_chunk(length: int) -> None:
    prompt = answer([7], length - 1)
    prompt = [7, *prompt]
    runtime = FakeRuntime()
    async with running(runtime, keep_kv=True) as loop:
        for _ in range(2):  # the second one finds nothing kept
            generation = request(prompt, 3, scored=True)
            generation.logprobs = Logprobs(2, FakeLine(), [])
            loop.submit(generation)
            begun = await first(generation)
            await collect(generation)
            assert "".join(one.text for one in begun.prompt_logprobs) == texts(prompt)
            assert begun.prompt_logprobs[0].logprob is None
            # The fake finds the next token e⁹ times as likely as any other.
            likely = 9 - math.log(math.exp(9) + VOCAB - 1)
            assert [one.logprob for one in begun.prompt_logprobs[1:]] == pytest.approx([likely] * (length - 1))
            assert [one.logprob for one in begun.logprobs] == pytest.approx([likely])
    sizes = [step[0][1] for step in runtime.steps]
    fed = [1, *[8] * ((length - 1) // 8), (length - 1) % 8]
    assert sizes[: len(sizes) // 2 - 2] == [size for size in fed if size]
