"""The check that owners of a GPU run: it runs the engine, says where, and fails where it should."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cloud_tier import engine_check
from cloud_tier.config import ModelConfig
from cloud_tier.engine.protocol import EngineChunk, EngineConfig, EngineInfo, EngineRequest
from cloud_tier.engine.torch_engine import TorchEngine
from cloud_tier.engine_check import EngineReport, check_engines
from cloud_tier.lineup import EngineSpec, line_up
from models.catalogue.families import load_catalogue
from models.store.store import ModelStore
from router.base.clock import MonotonicClock
from router.base.errors import ArtifactError, ConfigError
from tests.support import engine_models


class _Toys:
    """A tokenizer for the tiny models, which have none."""

    tokenizer: Any

    def __init__(self) -> None:
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        return [1 + ord(character) % 200 for character in text[:60]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    monkeypatch.setattr(EngineSpec, "prompts", lambda _: _Toys())
    folder, catalogue = engine_models.save("llama", tmp_path), load_catalogue()
    (found,) = line_up(
        [ModelConfig(path=str(folder), device="cpu", dtype="float32")], catalogue, ModelStore(tmp_path / "s", catalogue)
    )
    return found


async def _reports(place: EngineSpec, engine: type[TorchEngine] = TorchEngine) -> list[EngineReport]:
    return [report async for report in check_engines([place], engine, MonotonicClock())]


@pytest.mark.process
async def test_a_sound_engine_passes_and_names_its_device(place: EngineSpec) -> None:
    (report,) = await _reports(place)
    assert report.devices == ("cpu",)
    assert report.tokens == 4 * engine_check._ANSWER_TOKENS
    assert report.gap is not None
    assert report.gap <= 0.01


@pytest.mark.process
async def test_an_engine_that_should_be_on_a_gpu_and_is_not_fails_loudly(place: EngineSpec) -> None:
    class OnTheCpu(TorchEngine):
        def __init__(self, config: EngineConfig, *rest: Any) -> None:
            super().__init__(msgspec.structs.replace(config, device="cpu"), *rest)

    wanted = dataclasses.replace(place, engine=msgspec.structs.replace(place.engine, device="cuda"))
    with pytest.raises(ConfigError, match="should compute on cuda and computes on cpu"):
        await _reports(wanted, OnTheCpu)


@pytest.mark.process
async def test_an_engine_that_computes_something_else_is_found_out(place: EngineSpec) -> None:
    class Wrong(TorchEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
            async for chunk in super().generate(request):
                yield dataclasses.replace(chunk, token_ids=tuple((token + 1) % 300 for token in chunk.token_ids))

    with pytest.raises(ArtifactError, match="lower than its own choice"):
        await _reports(place, Wrong)


@pytest.mark.process
async def test_without_memory_for_the_reference_the_engine_is_still_run(
    place: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    (report,) = await _reports(place)
    assert report.gap is None


def test_an_engine_that_says_no_device_is_none_of_the_wanted(place: EngineSpec) -> None:
    info = EngineInfo(vocab_size=1, context_tokens=1, max_running=1, tensor_parallel=1)
    with pytest.raises(ConfigError, match="nothing known"):
        engine_check._check_devices(place, info)
