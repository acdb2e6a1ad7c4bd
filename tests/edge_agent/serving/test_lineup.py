"""The local replicas of an agent: what was begun and not finished leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import msgspec
import pytest

from edge_agent.config import LocalModels
from edge_agent.serving.lineup import Lineup
from edge_agent.serving.local_models import Shelf, local_models
from edge_agent.serving.replica import LocalModel, LocalReplica
from hardware_profiles.loader import load_profiles
from router.base.errors import ConfigError, ReplicaUnreachable
from router.values.prompt import TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.tiny_store import TinyWorld, build_world
from tests.support.waiting import until


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


class Models:
    """Models whose loading waits for `gate`, and of which it is known which are open."""

    def __init__(self, settings: LocalModels) -> None:
        self.gate = threading.Event()
        self.loading = threading.Event()
        self.open = 0
        self._shelf = Shelf.open(settings)

    def describe(self, settings: LocalModels) -> list[LocalModel]:
        found = local_models(settings, load_profiles()["generic-x86-cpu"], self._shelf)
        return [
            dataclasses.replace(model, open_runtime=self._opening(model))
            for model in found
            if isinstance(model, LocalModel)
        ]

    def _opening(self, model: LocalModel) -> Any:
        def opened() -> Any:
            self.loading.set()
            assert self.gate.wait(30)
            runtime = model.open_runtime()
            close = runtime.close

            def closed() -> None:
                self.open -= 1
                close()

            self.open += 1
            runtime.close = closed
            return runtime

        return opened


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("generate-")]


async def test_a_change_that_is_cancelled_leaves_no_thread_and_no_model(world: TinyWorld) -> None:
    settings = world.config().models
    models = Models(settings)
    async with Lineup(models.describe, lambda _: None) as lineup:
        change = asyncio.create_task(lineup.apply(settings))
        await until(models.loading.is_set)
        change.cancel()
        await asyncio.wait({change})
        assert change.cancelled()
        assert lineup.replicas == []
        models.gate.set()
        await until(lambda: not workers())  # while the agent lives on with what it had
        assert models.open == 0


async def test_a_lineup_that_is_left_during_a_cancelled_load_waits_for_its_end(world: TinyWorld) -> None:
    settings = world.config().models
    models = Models(settings)
    async with Lineup(models.describe, lambda _: None) as lineup:
        change = asyncio.create_task(lineup.apply(settings))
        await until(models.loading.is_set)
        change.cancel()
        await asyncio.wait({change})
        asyncio.get_running_loop().call_later(0.05, models.gate.set)
    assert workers() == []
    assert models.open == 0


async def test_a_model_that_cannot_be_loaded_stands_beside_those_that_can(world: TinyWorld) -> None:
    settings = world.config(models={"preload": ["tiny-int8", "tiny-pruned-int8"]}).models
    models = Models(settings)
    models.gate.set()

    def describe(wanted: LocalModels) -> list[LocalModel]:
        def broken() -> Any:
            raise ReplicaUnreachable("no memory left")

        first, second = models.describe(wanted)
        return [first, dataclasses.replace(second, open_runtime=broken)]

    async with Lineup(describe, lambda _: None) as lineup:
        await lineup.apply(settings)
        first, second = lineup.replicas
        assert (first.loaded, first.problem) == (True, "")
        assert second.problem == "no memory left"
        assert not second.snapshot().available
        assert second.snapshot().why == "no memory left"
    assert workers() == []
    assert models.open == 0


async def test_settings_that_nothing_could_serve_leave_no_thread_and_no_model(world: TinyWorld) -> None:
    settings = world.config().models
    models = Models(settings)
    models.gate.set()
    async with Lineup(models.describe, lambda _: None) as lineup:
        with pytest.raises(ConfigError):
            await lineup.apply(msgspec.structs.replace(settings, variants=("tiny-int8", "nothing"), preload=()))
        assert lineup.replicas == []
        assert workers() == []
    assert models.open == 0


async def test_a_runtime_that_does_not_come_back_from_a_step_is_not_offered(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.serving.replica._STUCK_S", 0.05)
    settings = world.config().models
    models = Models(settings)
    models.gate.set()
    stuck = threading.Event()

    def describe(wanted: LocalModels) -> list[LocalModel]:
        first, second = models.describe(wanted)

        def hanging() -> Any:
            runtime = first.open_runtime()
            forward = runtime.forward

            def waits(batch: Any) -> Any:
                stuck.wait(30)
                return forward(batch)

            runtime.forward = waits
            return runtime

        return [dataclasses.replace(first, open_runtime=hanging), second]

    async with Lineup(describe, lambda _: None) as lineup:
        await lineup.apply(settings)
        replica = lineup.replicas[0]
        assert replica.snapshot().available
        prompt, sampling = TextPrompt("hello"), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        stream = replica.generate(InferenceRequest("r", "tiny-int8", prompt, sampling, Objective(), 0, 0.0))
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: not replica.snapshot().available)
        assert "step" in replica.snapshot().why
        stuck.set()
        await first
        assert replica.snapshot().available
        await stream.aclose()


async def test_a_cold_model_is_predicted_by_its_size_and_then_by_its_last_load(world: TinyWorld) -> None:
    settings = world.config(models={"preload": []}).models
    models = Models(settings)

    def describe(wanted: LocalModels) -> list[LocalModel]:
        first, second = models.describe(wanted)
        return [dataclasses.replace(first, cold_start_s=40.0), second]

    async with Lineup(describe, lambda _: None) as lineup:
        await lineup.apply(settings)
        replica = lineup.replicas[0]
        prefill = replica.info.prior.prefill_tokens_per_s
        assert replica.snapshot().queued_prefill_tokens == int(40.0 * prefill)
        models.gate.set()
        await replica.load()
        assert replica.snapshot().queued_prefill_tokens == 0
        assert isinstance(replica, LocalReplica)
        assert 0 < (replica.loop.load_s or 0) < 30
    shelf = Shelf.open(settings)
    described = local_models(settings, load_profiles()["generic-x86-cpu"], shelf)
    assert all(model.cold_start_s > 0 for model in described)
