"""Who serves each `[[models]]` entry, and which GPUs the servers get that the tier starts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud_tier import backends
from cloud_tier.backends import Servers, plan_servers
from cloud_tier.config import CloudConfig, ModelConfig, ServerConfig
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from cloud_tier.gpus import Gpu
from models.catalogue.families import load_catalogue
from models.store.store import ModelStore
from router.base.errors import ConfigError

GPUS = tuple(Gpu(str(number), "a GPU", (80 + number) << 30) for number in range(4))


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "check_executable", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "tiny-7b"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return str(path)


class Pulled:
    """A store whose sources are all there, as one GGUF file each."""

    def source_path(self, family: str) -> Path:
        return Path(f"/store/{family}/model.gguf")


def planned(
    *models: ModelConfig, gpus: tuple[Gpu, ...] = GPUS, here: bool = True, servers: tuple[CloudBackend, ...] = ()
) -> Servers:
    catalogue = load_catalogue()
    config = CloudConfig(models=models, backends=servers, server=ServerConfig(warm_up=False))
    return plan_servers(config, catalogue, Pulled(), lambda *, expected: gpus, lambda: here)  # type: ignore[arg-type]


def server(name: str, **changes: Any) -> CloudBackend:
    return CloudBackend(name=name, kind="vllm", vllm=VllmSettings(model="org/tiny-7b", **changes))


def test_vllm_takes_a_directory_by_itself_where_it_is_and_there_is_a_gpu(folder: str) -> None:
    found = planned(ModelConfig(path=folder, family="tiny", rung=2, quality=0.5, tensor_parallel=2))
    assert found.config.models == ()
    ((spec,), (backend,)) = found.specs, found.config.backends
    assert spec.backend is backend
    assert (backend.name, backend.warm_up) == ("tiny-7b", False)
    (model,) = backend.models
    assert (model.served, model.family, model.rung, model.quality) == ("tiny-7b", "tiny", 2, 0.5)
    assert (spec.settings.model, spec.settings.tensor_parallel, spec.gpus) == (folder, 2, ("3", "2"))
    assert [gpu.id for gpu in found.engine_gpus(expected=True)] == ["0", "1"]


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, {"gpus": ()}),
        ({}, {"here": False}),
        ({"engine": "torch"}, {}),
        ({"device": "cpu"}, {}),
        ({"max_running": 3}, {}),
        ({"kv_cache_tokens": 99}, {}),
    ],
)
def test_the_embedded_engine_keeps_what_is_not_for_vllm(folder: str, changes: dict[str, Any], around: Any) -> None:
    entry = ModelConfig(path=folder, **changes)
    found = planned(entry, **around)
    assert found.config.models == (entry,)
    assert found.specs == ()


def test_the_catalogues_models_stay_with_the_embedded_engine() -> None:
    assert planned(ModelConfig(variant="smollm2-135m-fp32")).specs == ()


def test_asked_for_it_serves_also_without_a_gpu(folder: str) -> None:
    (spec,) = planned(ModelConfig(path=folder, engine="vllm", device="cpu"), gpus=()).specs
    assert spec.gpus == ()
    assert spec.on_cpu


def test_a_name_of_a_hub_is_left_to_vllm() -> None:
    (spec,) = planned(ModelConfig(path="org/tiny-7b", engine="vllm")).specs
    assert (spec.settings.model, spec.settings.served_name) == ("org/tiny-7b", "tiny-7b")


def test_what_the_entry_says_becomes_flags(folder: str) -> None:
    entry = ModelConfig(
        path=folder, engine="vllm", dtype="float16", max_context_tokens=4096, prefix_caching=False, step_timeout_s=9.0
    )
    (spec,) = planned(entry).specs
    assert spec.settings.args == ("--dtype", "float16", "--max-model-len", "4096", "--no-enable-prefix-caching")
    assert (spec.settings.silent_s, spec.settings.start_timeout_s) == (18.0, 1800.0)


def test_what_only_the_embedded_engine_has_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r'`token_budget` of .* is for engine = "torch"'):
        planned(ModelConfig(path=folder, engine="vllm", token_budget=7))


@pytest.mark.parametrize(
    ("name", "says"),
    [("smollm2-135m", "is the file model.gguf"), ("smollm2-135m-pruned-fp32", "is a selection of layers")],
)
def test_a_catalogue_model_that_vllm_cannot_load_is_said_so(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(ModelConfig(variant=name, engine="vllm"))


def test_the_same_entry_twice_makes_two_servers(folder: str) -> None:
    entry = ModelConfig(path=folder)
    found = planned(entry, entry, servers=(server("tiny-7b.2"),))
    assert [spec.backend.name for spec in found.specs] == ["tiny-7b.2", "tiny-7b", "tiny-7b.3"]
    assert len({spec.gpus for spec in found.specs}) == 3


def test_each_server_gets_gpus_that_no_other_has() -> None:
    found = planned(servers=(server("a", tensor_parallel=2), server("b", gpus=("3",)), server("c")))
    assert [spec.gpus for spec in found.specs] == [("2", "1"), ("3",), ("0",)]
    assert found.engine_gpus(expected=False) == ()


def test_ranks_on_a_cluster_are_not_counted_here() -> None:
    (spec,) = planned(servers=(server("a", tensor_parallel=16, executor="ray"),)).specs
    assert spec.gpus == ()
    assert not spec.on_cpu


def test_too_few_gpus_are_an_error_with_the_ways_out() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(servers=(server("a", tensor_parallel=2), server("b", tensor_parallel=2, data_parallel=2)))
    assert (
        "backends.b: tensor × pipeline × data parallel = 4 GPUs, and of the 4 here 2 are free" in caught.value.message
    )
    assert 'executor = "ray"' in caught.value.message


def test_without_gpus_ranks_are_vllms_own_affair() -> None:
    (spec,) = planned(gpus=(), servers=(server("a", tensor_parallel=2),)).specs
    assert spec.gpus == ()


def test_servers_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    found = planned(gpus=(), servers=(server("a"), server("b", executor="ray"), server("c", tensor_parallel=2)))
    assert [spec.cpu_bind for spec in found.specs] == ["0", "", "1|2"]
    assert [spec.cpu_bind for spec in planned(servers=(server("a"), server("b"))).specs] == ["", ""]


def test_a_tier_without_vllm_is_left_as_it_is() -> None:
    config = CloudConfig(backends=(CloudBackend(name="far", urls=("http://a:1",)),))
    catalogue = load_catalogue()
    found = plan_servers(config, catalogue, ModelStore(Path("/nonexistent"), catalogue))
    assert found.config is config
    assert found.specs == ()
