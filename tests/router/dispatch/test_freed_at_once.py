"""What a request leaves behind is freed when it ends: nothing of it waits for a garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncGenerator

import pytest

from router.base.errors import OverspillError
from router.dispatch.attempts.run import AttemptRun
from router.dispatch.binding.queue import QueueEntry
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.journey.journey import Journey
from router.signals.length import _Table as LengthTable
from router.simulation.loop import LoopClock, VirtualLoop, run_virtually
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

INFO = ReplicaInfo("one", "local", "edge", False, "family", "family-0", 0, 1.0, 8192, SpeedPrior(10_000.0, 100.0))


class Engine:
    """Answers three chunks."""

    info, link = INFO, None

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(INFO, True, 2)

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        for _ in range(2):
            await asyncio.sleep(0.1)
            yield TokenChunk("x")
        yield TokenChunk("x", finish_reason=FinishReason.STOP)


async def ask(dispatcher: Dispatcher, index: int, deadline_s: float, model: str = "family") -> str:
    request = InferenceRequest(
        request_id=str(index),
        model=model,
        prompt=TextPrompt("x"),
        sampling=SamplingParams(),
        objective=Objective(deadline_s=deadline_s),
        prompt_tokens=10,
        accepted_at_s=dispatcher.clock.now_s(),
    )
    try:
        answer = await dispatcher.start(request)
        async with contextlib.aclosing(answer.chunks) as chunks:
            async for _ in chunks:
                pass
    except OverspillError as error:
        return error.code
    return "answered"


@pytest.mark.interpreted
@pytest.mark.parametrize(("deadline_s", "outcome"), [(60.0, "answered"), (0.001, "deadline_lost")])
def test_an_ended_request_is_freed_by_reference_counting(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float, outcome: str
) -> None:
    made: list[weakref.ref[object]] = []
    for kind in (Journey, AttemptRun, QueueEntry):
        watched = type(kind.__name__, (kind,), {})

        def make(*args: object, of: type = watched, **more: object) -> object:
            one = of(*args, **more)
            made.append(weakref.ref(one))
            return one

        for room in ("dispatcher", "journey", "binding"):
            monkeypatch.setattr(f"router.dispatch.{room}.{kind.__name__}", make, raising=False)

    async def run(loop: VirtualLoop) -> list[str]:
        async with Dispatcher([Engine()], RouterSettings(), clock=LoopClock(loop)) as dispatcher:
            outcomes = [await ask(dispatcher, index, deadline_s) for index in range(3)]
            await asyncio.sleep(10.0)
            await ask(dispatcher, 3, 60.0)  # what the last decision looked at gives way to the next
            await asyncio.sleep(10.0)
            left = [one for one in (ref() for ref in made[:-3]) if one is not None]
            assert not left, left
            return outcomes

    gc.collect()
    gc.disable()
    try:
        assert set(run_virtually(run)) == {outcome}
        assert made
    finally:
        gc.enable()


def test_names_that_nobody_serves_leave_nothing_behind() -> None:
    """Anybody may ask for any name: none of them may cost memory once it was refused."""

    async def run(loop: VirtualLoop) -> list[int]:
        settings = RouterSettings(decision_log=4)
        async with Dispatcher([Engine()], settings, clock=LoopClock(loop)) as dispatcher:
            known = []
            for index in range(60):
                assert await ask(dispatcher, index, 5.0, f"unknown-{index}") == "model_not_found"
                if index % 20 == 19:
                    gc.collect()
                    known.append(sum(type(one) is LengthTable for one in gc.get_objects()))
            return known

    first, _, last = run_virtually(run)
    assert last == first
