"""The worker of the generation loop is supervised: whatever it raises, callers are told and later ones are served."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

import edge_agent.generate.loop as loop_module
from edge_agent.generate.loop import GenerationLoop
from edge_agent.generate.turn import Turn
from router.base.errors import ReplicaBroken, ReplicaError, ReplicaUnreachable
from router.dispatch.attempts.blame import Verdict, verdict
from tests.edge_agent.generate.test_loop import LIMITS, collect, first, request, running
from tests.support.fake_runtime import FakeRuntime, answer, texts


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_RESTART_PAUSE_S", (0.01, 0.05))


class Exhausted(FakeRuntime):
    """Cannot even forget a sequence."""

    def close_sequence(self, sequence: int, *, keep: bool = False) -> None:
        raise MemoryError


class Sudden(FakeRuntime):
    """Raises what no handler of `Exception` sees."""

    def forward(self, batch):
        super().forward(batch)
        raise SystemExit(3)


class Unloadable(FakeRuntime):
    def close(self) -> None:
        raise MemoryError


async def served(loop: GenerationLoop, prompt: list[int]) -> str:
    """The answer, asked for again while the worker is being restarted."""
    for _ in range(200):
        if not loop.resting:
            generation = request(prompt, 4)
            loop.submit(generation)
            with contextlib.suppress(ReplicaUnreachable):  # submitted in the moment of the failure
                return (await collect(generation))[0]
        await asyncio.sleep(0.01)
    raise AssertionError("it rests for ever")


@pytest.mark.parametrize("broken", [Exhausted, Sudden], ids=["close_sequence", "system-exit"])
async def test_a_worker_that_raises_ends_nobodys_wait_and_serves_again(broken: type[FakeRuntime]) -> None:
    async with running(broken(), FakeRuntime()) as loop:
        unlucky = request([5], 2)
        loop.submit(unlucky)
        with contextlib.suppress(ReplicaError):  # an answer that was complete before the failure stands
            await collect(unlucky)
        assert await asyncio.wait_for(served(loop, [6]), 30) == texts(answer([6], 4))
        assert loop.counters.worker_restarts == 1


async def test_everybody_in_flight_hears_of_a_failed_worker_at_once() -> None:
    runtime = Exhausted(gate=threading.Semaphore(4))
    async with running(runtime, FakeRuntime()) as loop:
        short, long, waiting = request([5], 6), request([6], 400), [request([7 + n], 9) for n in range(6)]
        for generation in (short, long, *waiting):
            loop.submit(generation)
        await first(long)
        runtime.gate.release(1000)
        with pytest.raises(ReplicaBroken):
            await asyncio.wait_for(collect(long), 30)
        for generation in waiting:
            with pytest.raises(ReplicaError):
                await asyncio.wait_for(collect(generation), 30)
        assert not list(loop.live)
        assert await asyncio.wait_for(served(loop, [6]), 30) == texts(answer([6], 4))


async def test_a_runtime_that_cannot_be_closed_does_not_end_the_worker() -> None:
    broken = Unloadable(fail_on=set(range(1, 100)))
    async with running(broken, FakeRuntime()) as loop:
        for _ in range(loop_module._FAILURES_BEFORE_RELOAD):
            generation = request([5], 2)
            loop.submit(generation)
            with pytest.raises(ReplicaUnreachable):
                await asyncio.wait_for(collect(generation), 30)
        assert await asyncio.wait_for(served(loop, [6]), 30) == texts(answer([6], 4))


class TooLarge(FakeRuntime):
    """Has no memory for prompts of more than three tokens."""

    def forward(self, batch):
        if any(len(item.token_ids) > 3 for item in batch):
            raise MemoryError("Unable to allocate 5.62 MiB")
        return super().forward(batch)


async def test_prompts_for_which_there_is_no_memory_take_the_model_from_nobody() -> None:
    """Three of them had the model loaded anew, which found no room any more: nobody was served from then on."""
    async with running(TooLarge()) as loop:
        for _ in range(2 * loop_module._FAILURES_BEFORE_RELOAD):
            generation = request([5, 6, 7, 8], 2)
            loop.submit(generation)
            with pytest.raises(ReplicaError, match="Unable to allocate"):
                await asyncio.wait_for(collect(generation), 30)
        assert await asyncio.wait_for(served(loop, [6]), 30) == texts(answer([6], 4))
        assert loop.counters.loads == 1


async def test_a_worker_that_fails_again_and_again_rests_longer_each_time_and_refuses_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "_RESTART_PAUSE_S", (30.0, 60.0))
    async with running(Sudden()) as loop:
        generation = request([5], 2)
        loop.submit(generation)
        with pytest.raises(ReplicaUnreachable):
            await asyncio.wait_for(collect(generation), 30)
        assert loop.resting
        assert 20 < loop.rest_s <= 30
        assert "SystemExit" in loop.problem
        late = request([5], 2)
        loop.submit(late)
        with pytest.raises(ReplicaUnreachable, match="SystemExit"):
            await asyncio.wait_for(collect(late), 30)


async def test_a_dead_worker_is_noticed_by_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line: a thread that is gone for any reason, such as an exit inside a library, must not be waited for."""
    monkeypatch.setattr(GenerationLoop, "_work", lambda _: None)
    loop = GenerationLoop("fake", FakeRuntime, LIMITS, Turn())
    loop._thread.join(5)
    generation = request([5], 2)
    loop.submit(generation)
    with pytest.raises(ReplicaUnreachable, match="worker"):
        await asyncio.wait_for(collect(generation), 30)
    with pytest.raises(ReplicaUnreachable, match="worker"):
        await asyncio.wait_for(loop.load(), 30)
    await loop.close()


async def test_a_prompt_that_cannot_be_opened_fails_alone() -> None:
    class Picky(FakeRuntime):
        def open(self, token_ids, caller="", *, exact=False, from_scratch=False):
            if token_ids[0] == 13:
                raise MemoryError
            return super().open(token_ids, caller, exact=exact)

    async with running(Picky()) as loop:
        well, sick = request([5], 30), request([13], 5)
        loop.submit(well)
        loop.submit(sick)
        with pytest.raises(ReplicaUnreachable, match="MemoryError"):
            await collect(sick)
        assert (await collect(well))[0] == texts(answer([5], 30))
        assert loop.counters.loads == 1


class Poisoned(FakeRuntime):
    """Raises for any batch that holds a sequence whose prompt begins with 13, or any at all once `many` run."""

    many = 99

    def forward(self, batch):
        if len(batch) >= self.many:
            raise RuntimeError("the batch is too large")
        if any(self.sequences[item.sequence][:1] == [13] for item in batch):
            raise RuntimeError("a poisoned sequence")
        return super().forward(batch)


async def test_an_exception_in_a_batch_ends_only_the_sequence_that_caused_it() -> None:
    async with running(Poisoned()) as loop:
        sick, well = request([13], 9), [request([5 + n], 25) for n in range(3)]
        for generation in (*well, sick):
            loop.submit(generation)
        with pytest.raises(ReplicaBroken, match="poisoned"):
            await collect(sick)
        for n, generation in enumerate(well):
            assert (await collect(generation))[0] == texts(answer([5 + n], 25))
        assert loop.counters.loads == 1


async def test_a_batch_that_fails_as_a_whole_is_computed_one_by_one() -> None:
    runtime = Poisoned()
    runtime.many = 3
    async with running(runtime) as loop:
        generations = [request([5 + n], 25) for n in range(4)]
        for generation in generations:
            loop.submit(generation)
        for n, generation in enumerate(generations):
            assert (await collect(generation))[0] == texts(answer([5 + n], 25))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_one_non_finite_logit_fails_that_request_alone(value: float) -> None:
    class Sick(FakeRuntime):
        def forward(self, batch):
            logits = super().forward(batch)
            for index, item in enumerate(batch):
                if self.sequences[item.sequence][0] == 13 and item.want_logits:
                    logits[index, 50] = value
            return logits

    async with running(Sick()) as loop:
        sick, well = request([13], 5), request([5], 5)
        loop.submit(sick)
        loop.submit(well)
        with pytest.raises(ReplicaUnreachable, match="no usable output"):
            await collect(sick)
        assert (await collect(well))[0] == texts(answer([5], 5))


async def test_a_prompt_that_a_model_always_fails_on_counts_once_against_it() -> None:
    class Sick(FakeRuntime):
        def forward(self, batch):
            return super().forward(batch) * np.nan

    async with running(Sick()) as loop:
        sick = request([13], 5)
        loop.submit(sick)
        with pytest.raises(ReplicaUnreachable) as raised:
            await collect(sick)
    assert verdict(raised.value) is Verdict.FAILED  # by its prompt; DOWN would count each of its requests
