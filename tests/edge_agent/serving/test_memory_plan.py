"""Memory before loading: weights, workspace and the whole KV cache count; slots are reduced visibly, or none is had."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

import edge_agent.serving.local_models as local_models_module
from edge_agent.runtime.manifest import read_manifest
from edge_agent.runtime.protocol import RuntimeRequest
from edge_agent.serving.lineup import Lineup
from edge_agent.serving.local_models import Shelf, local_models
from edge_agent.serving.memory_plan import MemoryNeed, need_of, slots_that_fit
from hardware_profiles.loader import Profile, RuntimeOptions, TensorRtOptions, load_profiles
from router.base.errors import ConfigError, ReplicaUnreachable
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.tiny_store import TinyWorld, build_world

MIB = 1 << 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


def asked(world: TinyWorld, **options: Any) -> RuntimeRequest:
    runtime = RuntimeOptions(intra_op_threads=1, **options)
    return RuntimeRequest(world.store / "tiny" / "tiny-int8", runtime, 4, context_tokens=256, chunk_tokens=64)


def test_the_kv_cache_of_every_slot_counts(world: TinyWorld) -> None:
    request = asked(world)
    manifest = read_manifest(request.artifact_dir)
    need = need_of(manifest, request)
    assert need.slot_bytes == 2 * manifest.num_layers * manifest.num_kv_heads * manifest.head_dim * 4 * 256
    assert need.weights_bytes == sum(file.bytes for file in manifest.files.values())
    assert need.total_bytes(4) - need.total_bytes(1) == 3 * need.slot_bytes
    longer = dataclasses.replace(request, context_tokens=99_999)
    assert need_of(manifest, longer).slot_bytes == need.slot_bytes * manifest.context_tokens // 256


def test_an_engine_counts_with_its_workspace(world: TinyWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = tmp_path / "tiny.plan"
    plan.write_bytes(bytes(5000))
    module = types.ModuleType("tensorrt")
    vars(module)["__version__"] = "10.3"
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr("edge_agent.runtime.tensorrt.runtime.find_plan", lambda *_: plan)
    request = asked(world, name="tensorrt", tensorrt=TensorRtOptions(workspace_bytes=300 * MIB))
    need = need_of(read_manifest(request.artifact_dir), request)
    assert need.weights_bytes == 10_000
    assert need.workspace_bytes >= 300 * MIB


@pytest.mark.parametrize(("free_mib", "slots"), [(1000, 4), (239, 3), (121, 1)])
def test_as_many_slots_as_fit(free_mib: int, slots: int) -> None:
    need = MemoryNeed(weights_bytes=80 * MIB, workspace_bytes=0, slot_bytes=40 * MIB)
    assert slots_that_fit("m", need, 4, free_mib * MIB) == slots


def test_not_one_slot_is_refused_with_every_figure() -> None:
    need = MemoryNeed(weights_bytes=80 * MIB, workspace_bytes=10 * MIB, slot_bytes=40 * MIB)
    with pytest.raises(ReplicaUnreachable, match=r"130 MiB.*80 MiB.*10 MiB.*40 MiB.*129 MiB are free"):
        slots_that_fit("m", need, 4, 129 * MIB)


def free_for(monkeypatch: pytest.MonkeyPatch, world: TinyWorld, slots: float) -> None:
    request = asked(world)
    need = need_of(read_manifest(request.artifact_dir), request)
    free = need.fixed_bytes + int(slots * need.slot_bytes)
    monkeypatch.setattr(local_models_module, "available_bytes", lambda: free)


async def test_a_model_with_fewer_slots_serves_no_more_at_once(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_for(monkeypatch, world, 2.5)
    settings = world.config(models={"variants": ["tiny-int8"]}).models
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
        await lineup.apply(settings)
        replica = lineup.replicas[0]
        assert replica.snapshot().slots == 2
        assert "2 of 4 KV slots" in replica.remarks

        async def one(number: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            prompt = ChatPrompt((Message("user", "hello"),))
            wanted = InferenceRequest(f"r{number}", "tiny-int8", prompt, params, Objective(), 0, 0.0)
            async for _ in replica.generate(wanted):
                assert replica.snapshot().running <= 2

        await asyncio.wait_for(asyncio.gather(*map(one, range(6))), 30)
        replica.throttle("hot")
        assert replica.snapshot().slots == 1
        replica.throttle("")
        assert replica.snapshot().slots == 2


async def test_memory_promised_to_one_model_is_not_free_for_the_next(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_for(monkeypatch, world, 4.2)  # as if nothing of it was ever taken
    settings = world.config(models={"preload": ["tiny-int8", "tiny-pruned-int8"]}).models
    profile, shelf = load_profiles()["generic-x86-cpu"], Shelf.open(settings)
    async with Lineup(lambda wanted: local_models(wanted, profile, shelf), lambda _: None) as lineup:
        await lineup.apply(settings)
        first, second = lineup.replicas
        assert first.snapshot().slots == 4
        assert not second.loaded or second.snapshot().slots < 4
        await first.close()
        assert (
            shelf.promises.open_bytes()
            < 4 * need_of(read_manifest(world.store / "tiny" / "tiny-pruned-int8"), asked(world)).slot_bytes
        )


def jetson() -> Profile:
    profile = load_profiles()["jetson-orin-nano-8gb"]
    tensorrt = msgspec.structs.replace(profile.runtime.tensorrt, max_batch=4)
    return msgspec.structs.replace(profile, runtime=msgspec.structs.replace(profile.runtime, tensorrt=tensorrt))


@pytest.mark.parametrize(("key", "value"), [("kv_slots", 8), ("prefill_chunk_tokens", 512), ("context_tokens", 4096)])
def test_more_than_the_engines_hold_is_a_configuration_error(world: TinyWorld, key: str, value: int) -> None:
    settings = world.config(models={"variants": ["tiny-int8"], key: value}).models
    with pytest.raises(ConfigError) as raised:
        local_models(settings, jetson(), Shelf.open(settings))
    assert raised.value.param == f"models.{key}"
    assert str(value) in raised.value.message
    local_models(settings, load_profiles()["generic-x86-cpu"], Shelf.open(settings))  # no engine, no bound
