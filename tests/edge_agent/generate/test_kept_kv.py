"""What the loop keeps of ended answers, for whom, and when it lets go of it: on a fake runtime."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edge_agent.generate import loop as generate_loop
from edge_agent.generate.loop import GenerationLoop
from router.base.errors import OverspillError
from router.values.chunk import TokenChunk
from tests.edge_agent.generate.test_loop import collect, first, request, running
from tests.support.fake_runtime import FakeRuntime, answer, texts
from tests.support.waiting import until

PROMPT = list(range(3, 43))


async def chunks(loop: GenerationLoop, prompt: list[int], count: int, caller: str = "") -> list[TokenChunk]:
    generation = request(prompt, count, caller=caller)
    loop.submit(generation)
    found: list[TokenChunk] = []
    while not found or found[-1].finish_reason is None:
        item = await asyncio.wait_for(generation.inbox.get(), 60)
        if isinstance(item, OverspillError):
            raise item
        found.append(item)
    return found


def text_of(found: list[TokenChunk]) -> str:
    return "".join(chunk.text for chunk in found)


async def test_the_next_turn_computes_only_what_is_new() -> None:
    runtime = FakeRuntime()
    async with running(runtime, keep_kv=True) as loop:
        one = await chunks(loop, PROMPT, 9)
        second = [*PROMPT, *answer(PROMPT, 9), 50, 51, 52]
        two = await chunks(loop, second, 5)
        assert text_of(two) == texts(answer(second, 5))
        assert [chunk.cached_tokens for chunk in one] == [0] + [None] * 8
        assert [chunk.cached_tokens for chunk in two] == [48] + [None] * 4  # the last token drawn was never fed
        assert loop.counters.cached_tokens == 48
        assert loop.counters.prefill_tokens == len(PROMPT) + len(second) - 48
        assert two[-1].prompt_tokens == len(second)


@pytest.mark.parametrize(("keep_kv", "caller"), [(False, "a"), (True, "b")], ids=["not kept", "another caller"])
async def test_nothing_is_reused_where_it_must_not_be(keep_kv: bool, caller: str) -> None:
    async with running(FakeRuntime(), keep_kv=keep_kv) as loop:
        await chunks(loop, PROMPT, 9, "a")
        again = await chunks(loop, [*PROMPT, *answer(PROMPT, 9), 50], 3, caller)
        assert again[0].cached_tokens == 0


async def test_an_answer_that_its_caller_stops_is_kept_and_one_that_failed_is_not() -> None:
    runtime = FakeRuntime(gate=threading.Semaphore(6))
    async with running(runtime, keep_kv=True) as loop:
        stopped = request(PROMPT, 90)
        loop.submit(stopped)
        await first(stopped)
        loop.cancel(stopped)
        runtime.gate.release(1)
        await until(lambda: len(runtime.kept) == 1)
        runtime.fail_on = {len(runtime.steps) + 2, len(runtime.steps) + 3}
        runtime.gate.release(1000)
        failing = request([7, *PROMPT], 5)
        loop.submit(failing)
        with pytest.raises(OverspillError):
            await collect(failing)
        await until(lambda: not runtime.sequences)
        assert [ids[0] for _, ids in runtime.kept] == [PROMPT[0]]


async def test_a_device_in_trouble_keeps_nothing_beyond_its_slots() -> None:
    runtime = FakeRuntime()
    async with running(runtime, keep_kv=True) as loop:
        await asyncio.gather(*(chunks(loop, [number, *PROMPT], 3) for number in range(60, 64)))
        await until(lambda: len(runtime.kept) == 4)
        loop.limit_slots(1)
        await until(lambda: len(runtime.kept) == 1)
        assert text_of(await chunks(loop, PROMPT, 3)) == texts(answer(PROMPT, 3))
        await until(lambda: len(runtime.kept) == 1)


async def test_an_idle_loop_forgets_what_it_keeps_and_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_loop, "_IDLE_BEFORE_RELEASE_S", 0.05)
    monkeypatch.setattr(generate_loop, "_IDLE_BEFORE_FORGETTING_S", 0.2)
    runtime = FakeRuntime()
    async with running(runtime, keep_kv=True) as loop:
        await chunks(loop, PROMPT, 3)
        await until(lambda: runtime.released == 1)
        assert len(runtime.kept) == 1
        await until(lambda: runtime.released == 2)
        assert not runtime.kept


async def test_the_last_chunk_does_not_wait_for_the_slot_to_be_given_back() -> None:
    closing = threading.Event()

    class Slow(FakeRuntime):
        def close_sequence(self, sequence: int, *, keep: bool = False) -> None:
            closing.wait(20)
            super().close_sequence(sequence, keep=keep)

    async with running(Slow(), keep_kv=True) as loop:
        try:
            assert text_of(await chunks(loop, PROMPT, 3)) == texts(answer(PROMPT, 3))
        finally:
            closing.set()
