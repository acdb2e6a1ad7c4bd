"""Engines are built for real, for a GPU that is not there; what cannot be built is refused with a reason."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from models.store.store import ModelStore
from models.tensorrt.build import BuildOptions, build, device_compute_capability
from router.base.errors import ArtifactError, InvalidRequest
from tests.support.model_store import tiny_store

SMALL = BuildOptions(new_tokens=(1, 1, 8), past_tokens=(1, 8, 32), optimization_level=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return tiny_store(tmp_path_factory.mktemp("store"))


@pytest.mark.slow
def test_an_engine_is_built_for_a_gpu_that_is_not_there_and_reused(store: ModelStore) -> None:
    pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    options = replace(SMALL, past_tokens=(1, 8, 16))
    engine = build("tiny-int8", store, target="sm86", options=options)
    assert engine.plan.stat().st_size == engine.plan_bytes > 10_000
    assert engine.int8_checked in ("engine", "network")
    assert not engine.reused
    record = json.loads(engine.plan.with_suffix(".json").read_text())
    assert record["key"]["target"] == "sm86"
    assert set(record["key"]["onnx"]) == {"model.onnx", "model.onnx.data"}
    again = build("tiny-int8", store, target="sm86", options=options)
    assert again.reused
    assert again.plan == engine.plan
    engine.plan.write_bytes(b"cut short")
    assert not build("tiny-int8", store, target="sm86", options=options).reused


@pytest.mark.slow
def test_another_target_or_shape_is_another_engine(store: ModelStore) -> None:
    pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    one = build("tiny-int8", store, target="sm86", options=SMALL)
    other = build("tiny-int8", store, target="sm89", options=SMALL)
    assert one.plan != other.plan
    assert not list(one.plan.parent.glob(".*"))


def test_orin_is_built_on_the_device(store: ModelStore) -> None:
    pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    with pytest.raises(ArtifactError, match=r"Jetsons .* build on the device"):
        build("tiny-int8", store, target="sm87")


def test_a_missing_module_names_its_installation(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ArtifactError, match=r"pip install .*\[tensorrt\]"):
        build("tiny-int8", store, runtime="tensorrt", target="sm87")


@pytest.mark.parametrize("there", [("tensorrt", "tensorrt_rtx"), ("tensorrt_rtx",), ()])
def test_what_is_installed_builds(store: ModelStore, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"{name} is broken")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ArtifactError) as raised:
        build("tiny-int8", store, target="sm86")
    if there:
        assert f"{there[0]} is broken" in raised.value.message
    else:
        assert "JetPack" in raised.value.message
        assert "pip install tensorrt-rtx" in raised.value.message


@pytest.mark.skipif(device_compute_capability() is not None, reason="this machine has a GPU")
def test_without_a_gpu_a_target_must_be_named(store: ModelStore) -> None:
    pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    with pytest.raises(ArtifactError, match="--target sm86"):
        build("tiny-int8", store)


def test_an_unknown_runtime_and_wrong_shapes_are_refused(store: ModelStore) -> None:
    with pytest.raises(InvalidRequest, match="unknown runtime"):
        build("tiny-int8", store, runtime="tensorflow")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="`batch` is"):
        BuildOptions(batch=(2, 1, 4))


def test_a_float_variant_that_was_not_exported_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="overspill models export tiny-fp32"):
        build("tiny-fp32", tiny_store(tmp_path), target="sm86", options=SMALL)


def test_a_graph_outside_the_rules_is_never_built(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    store = tiny_store(tmp_path)
    path = store.artifact_dir("tiny-int8") / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    zero = next(tensor for tensor in model.graph.initializer if tensor.name == "zero_point")
    zero.raw_data = b"\x01"
    onnx.save(model, str(path))
    with pytest.raises(ArtifactError, match="a zero point is not 0"):
        build("tiny-int8", store, target="sm86", options=SMALL)


@pytest.mark.real_model
def test_the_real_model_parses_with_no_gpu(models_root: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="no wheel for this platform")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    path = ModelStore(models_root).artifact_dir("smollm2-135m-int8") / "model.onnx"
    assert parser.parse_from_file(str(path)), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    assert sum(network.get_layer(i).type == trt.LayerType.QUANTIZE for i in range(network.num_layers)) == 121
