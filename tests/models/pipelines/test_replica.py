"""A pipeline as the router sees it: loaded, loaded anew, and resting where that does not help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from models.pipelines.pipeline import PipelinePlan
from models.pipelines.replica import PipelineReplica, ServedPipeline
from models.pipelines.stage import StagePlan
from router.base.errors import RequestFailed, Unavailable
from router.values.prompt import Input, TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.task import Embeddings, Output
from tests.support.clocks import VirtualClock
from tests.support.gateway_fakes import replica_info
from tests.support.waiting import until


class Texts:
    """Calls are texts, and so are answers."""

    def values(self, prompt: Input) -> Sequence[Any]:
        assert isinstance(prompt, TextPrompt)
        return [prompt.text]

    def output(self, results: Sequence[Any]) -> tuple[Output, int]:
        return Embeddings(b"", 1), len(results)


async def ask(replica: PipelineReplica, text: str, tokens: int = 1) -> None:
    request = InferenceRequest("r", "m", TextPrompt(text), SamplingParams(), Objective(), tokens, 0.0)
    async for _ in replica.generate(request):
        pass


async def test_a_stage_that_fails_again_once_it_is_loaded_anew_rests_longer_and_longer() -> None:
    """A device that is gone: each load takes its time, and those who come meanwhile had better go elsewhere."""
    gone, clock = threading.Event(), VirtualClock()

    def work(batch: list[str]) -> list[str]:
        if gone.is_set():
            raise RuntimeError("no device")
        return batch

    plan = PipelinePlan("m", (StagePlan("model", lambda: work),))
    replica = PipelineReplica(ServedPipeline(replica_info("m"), 4, Texts(), lambda: plan), clock)

    async def fail() -> None:
        loads = replica.loads
        for _ in range(3):
            with pytest.raises(RequestFailed, match="no device"):
                await ask(replica, "b")
        await until(lambda: not replica.loaded)
        assert replica.loads <= loads + 1

    try:
        await ask(replica, "a")
        gone.set()
        await fail()
        assert replica.snapshot().available, "to load it anew may help"
        for rest_s in (5.0, 10.0, 20.0):
            await fail()
            snapshot = replica.snapshot()
            assert (snapshot.available, snapshot.back_in_s) == (False, rest_s)
            assert "fails on an input that it has computed before" in snapshot.why
            with pytest.raises(Unavailable) as refused:
                await ask(replica, "b")
            assert refused.value.retry_after_s == rest_s
            clock.pass_s(rest_s)
        gone.clear()
        await ask(replica, "b")
        assert replica.snapshot().available
        clock.pass_s(3600.0)
        gone.set()
        await fail()
        assert replica.snapshot().available, "long ago is no reason to rest"
    finally:
        await replica.close()


async def test_a_request_of_many_inputs_counts_as_one_turn_of_it() -> None:
    """Whoever comes while it is computed waits for no more, and is not told that it had to."""
    going = threading.Event()

    def work(batch: list[str]) -> list[str]:
        going.wait()
        return batch

    plan = PipelinePlan("m", (StagePlan("model", lambda: work),))
    info = replace(replica_info("m"), turn_tokens=1000)
    replica = PipelineReplica(ServedPipeline(info, 4, Texts(), lambda: plan), VirtualClock())
    many, few = asyncio.create_task(ask(replica, "a", 500_000)), asyncio.create_task(ask(replica, "b", 30))
    try:
        await until(lambda: replica.busy == 2)
        assert replica.snapshot().queued_prefill_tokens == 1030
    finally:
        going.set()
        await asyncio.gather(many, few)
        await replica.close()
