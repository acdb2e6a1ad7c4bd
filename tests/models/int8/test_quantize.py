"""INT8 artifacts: rounding errs by half a step, the gate refuses every forbidden form, and nothing bad is placed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, numpy_helper

from models.graph.artifact import encoder_of
from models.graph.decoder import Decoder
from models.graph.fused import fuse
from models.graph.gate import check_graph, inspect, problems
from models.graph.graph import write_graph
from models.graph.int8 import quantize_columns
from models.int8 import quantize as quantize_module
from models.int8.calibrate import observe
from models.int8.quantize import Quantizer, Trial, quantize
from models.int8.rounding import Quantized, prepare
from models.measure.corpus import Chat, chats
from models.measure.runner import OnnxRunner
from models.store.store import ModelStore
from router.base.errors import ArtifactError, InvalidRequest
from tests.support.tiny_models import SHAPES, TinyWeights, place, tiny_config

SEQUENCES = [[1, *np.random.default_rng(seed).integers(3, 96, 40).tolist()] for seed in range(12)]


def _prepared(shape: str = "grouped, tied") -> Quantized:
    return prepare(fuse(TinyWeights(tiny_config(**SHAPES[shape]))), SEQUENCES, seed=7)


@settings(max_examples=60)
@given(hnp.arrays(np.float32, (12, 5), elements=st.floats(-1e4, 1e4, width=32)))
def test_rounding_errs_by_half_a_step_or_clips_to_lose_less(matrix: np.ndarray) -> None:
    values, scale = quantize_columns(matrix)
    assert values.dtype == np.int8
    assert values.min() >= -127
    assert (scale > 0).all()
    plain = np.maximum(np.abs(matrix).max(axis=0), 1e-30) / 127
    rounded = np.rint(matrix / plain) * plain
    ours, naive = (np.square(matrix - guess).sum(axis=0) for guess in (values * scale, rounded))
    assert (ours <= naive * 1.001 + 1e-6).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_follows_float32_in_every_shape(shape: str, tmp_path: Path) -> None:
    plain = fuse(TinyWeights(tiny_config(**SHAPES[shape])))
    ready = prepare(plain, SEQUENCES, seed=7)
    facts = check_graph(write_graph(ready.model, tmp_path, ready.plan))
    assert facts.float_weights_bytes == 0
    runner = place(ready.model, tmp_path, ready.prefix)
    decoder = Decoder(plain)
    ids = SEQUENCES[0]
    expected = decoder(decoder.fresh(ids)).logits[0, 1:].numpy()
    error = runner.score(ids) - expected
    assert np.sqrt(np.square(error).mean()) < 0.1 * expected.std()


def test_the_prefix_is_the_token_that_all_sequences_begin_with() -> None:
    model = fuse(TinyWeights(tiny_config()))
    prefix = prepare(model, SEQUENCES, seed=7).prefix
    assert prefix is not None
    assert prefix.token_ids == (1,)
    assert prefix.k.shape == prefix.v.shape == (2, 2, 1, 16)
    assert prepare(model, [[1, 2, 3], [2, 3, 4]], seed=7).prefix is None


def test_position_0_sets_no_scale() -> None:
    model = fuse(TinyWeights(tiny_config()))
    model.embedding[1] *= 1000  # the first token of every sequence
    watched = observe(model, SEQUENCES)
    calm = fuse(TinyWeights(tiny_config()))
    assert watched.tokens == 40 * len(SEQUENCES)
    assert watched.largest()[0, "qkv"].max() <= observe(calm, SEQUENCES).largest()[0, "qkv"].max() * 1.01


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        ready = _prepared()
        write_graph(ready.model, tmp_path / name, ready.plan)
    for file in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_nothing_to_calibrate_on_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="at least one calibration sequence"):
        prepare(fuse(TinyWeights(tiny_config())), [[1]], seed=7)


def _initializer(model: onnx.ModelProto, part: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if part in tensor.name)


def _zero_point_of_one(model: onnx.ModelProto) -> None:
    tensor = _initializer(model, "zero_point")
    tensor.CopyFrom(numpy_helper.from_array(np.array(1, np.int8), tensor.name))


def _unsigned_activations(model: onnx.ModelProto) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "zero_point")
    tensor.CopyFrom(numpy_helper.from_array(np.array(0, np.uint8), tensor.name))


def _no_zero_point(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    del node.input[2]


def _int32_bias(model: onnx.ModelProto) -> None:
    bias = numpy_helper.from_array(np.zeros(8, np.int32), "bias")
    scale = numpy_helper.from_array(np.ones(8, np.float32), "bias_scale")
    zeros = numpy_helper.from_array(np.zeros(8, np.int32), "bias_zero")
    model.graph.initializer.extend([bias, scale, zeros])
    node = onnx.helper.make_node("DequantizeLinear", ["bias", "bias_scale", "bias_zero"], ["bias_dq"], axis=0)
    model.graph.node.append(node)


def _broken_scale(model: onnx.ModelProto) -> None:
    tensor = _initializer(model, "input_scale")
    tensor.CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), tensor.name))


def _dynamic_quantization(model: onnx.ModelProto) -> None:
    model.graph.node.append(
        onnx.helper.make_node("DynamicQuantizeLinear", ["attention_bias"], ["a", "b", "c"], name="dynamic")
    )


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_zero_point_of_one, "a zero point is not 0"),
        (_unsigned_activations, "quantized type is UINT8"),
        (_no_zero_point, "its zero point is not a constant"),
        (_int32_bias, "a INT32 constant is dequantized"),
        (_broken_scale, "a scale is not finite"),
        (_dynamic_quantization, "is not Q/DQ form"),
    ],
)
def test_the_gate_refuses(damage: Callable[[onnx.ModelProto], None], complaint: str, tmp_path: Path) -> None:
    ready = prepare(fuse(TinyWeights(tiny_config())), SEQUENCES, seed=7)
    path = write_graph(ready.model, tmp_path, ready.plan)
    assert problems(path) == []
    model = onnx.load(str(path), load_external_data=False)
    damage(model)
    onnx.save(model, str(path))
    assert any(complaint in line for line in problems(path)), problems(path)
    with pytest.raises(ArtifactError, match="breaks"):
        check_graph(path)


def test_the_gate_refuses_a_float_graph(tmp_path: Path) -> None:
    path = write_graph(fuse(TinyWeights(tiny_config())), tmp_path)
    with pytest.raises(ArtifactError, match="no matrix is INT8 at all"):
        check_graph(path)


@pytest.fixture
def speaking_store(tmp_path: Path, models_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store whose SmolLM2 is a tiny random model, so that making the artifact takes a second."""
    (tmp_path / "smollm2-135m").mkdir()
    source = ModelStore(models_root).source_path("smollm2-135m").parent
    (tmp_path / "smollm2-135m" / "source").symlink_to(source)
    monkeypatch.setattr("models.int8.quantize.fuse", lambda _: fuse(TinyWeights(tiny_config())))
    monkeypatch.setattr("models.int8.quantize.chats", lambda *_: [Chat("", ids, [5]) for ids in SEQUENCES])
    return ModelStore(tmp_path)


@pytest.mark.real_model
def test_a_refused_graph_is_not_placed(speaking_store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.int8.quantize.write_graph", lambda model, folder, _: write_graph(model, folder))
    with pytest.raises(ArtifactError, match="no matrix is INT8"):
        quantize("smollm2-135m-int8", speaking_store)
    family = speaking_store.root / "smollm2-135m"
    assert not (family / "smollm2-135m-int8").exists()
    assert not list(family.glob(".*staging*"))


def _made(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


@pytest.mark.real_model
def test_the_seed_that_was_used_is_recorded_also_where_the_first_loses_a_fact(
    speaking_store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crack 30: the manifest and the recipe named the first seed, whichever one was used."""
    own = speaking_store.catalogue.variant("smollm2-135m-int8").rotation_seed
    other = next(seed for seed in quantize_module._SEEDS if seed != own)
    verdicts = iter([["lost 'Paris'"], []])
    monkeypatch.setattr(Quantizer, "lost_in_speech", lambda *_: next(verdicts))
    notes: list[str] = []
    folder = quantize("smollm2-135m-int8", speaking_store, note=notes.append)
    assert f"smollm2-135m-int8: rotation {own} refused: lost 'Paris'" in notes
    assert _made(folder)["rotation"] == {"seed": other, "refused": [own]}
    assert f"rotation-seed-{other}" in _made(folder)["steps"]
    speaking_store.check_artifact("smollm2-135m-int8")
    assert "manifest.json" not in _made(folder)["files"]
    notes.clear()
    assert quantize("smollm2-135m-int8", speaking_store, note=notes.append) == folder
    assert len(notes) == 1
    assert "already" in notes[0]


@pytest.mark.real_model
def test_another_seed_is_another_recipe(speaking_store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crack 30: an artifact of another seed than the catalogue's was taken for the one asked for."""
    monkeypatch.setattr(Quantizer, "lost_in_speech", lambda *_: [])
    folder = quantize("smollm2-135m-int8", speaking_store)
    before = _made(folder)
    variant = speaking_store.catalogue.variant("smollm2-135m-int8")
    assert before["rotation"] == {"seed": variant.rotation_seed, "refused": []}
    pinned = msgspec.structs.replace(variant, rotation_seed=11)
    monkeypatch.setattr(speaking_store.catalogue, "variant", lambda _: pinned)
    after = _made(quantize("smollm2-135m-int8", speaking_store))
    assert after["rotation"] == {"seed": 11, "refused": []}
    assert after["recipe"] != before["recipe"]


@pytest.mark.real_model
def test_of_several_seeds_the_selection_set_chooses(
    speaking_store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crack 30: lowest perplexity on the selection set, of those that lose nothing; who was refused is recorded."""
    measured = {21: Trial(21, 17.0, "lost 'Paris'"), 22: Trial(22, 17.3, ""), 23: Trial(23, 17.2, "")}
    monkeypatch.setattr(Quantizer, "trial", lambda _self, _folder, seed: measured[seed])
    folder = quantize("smollm2-135m-int8", speaking_store, seeds=(21, 22, 23))
    assert _made(folder)["rotation"] == {"seed": 23, "refused": [21]}
    measured[22] = measured[23] = measured[21]
    with pytest.raises(ArtifactError, match="whatever the rotation"):
        quantize("smollm2-135m-int8", speaking_store, seeds=(21, 22, 23))
    assert _made(folder)["rotation"]["seed"] == 23, "what was there stays"


@pytest.mark.real_model
def test_a_trial_measures_the_selection_set(
    speaking_store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial").mkdir()
    quantizer = Quantizer(speaking_store.catalogue.variant("smollm2-135m-int8"), speaking_store)
    asked: list[str] = []

    def some_chunks(name: str, _encoder: object) -> list[list[int]]:
        asked.append(name)
        return SEQUENCES[:2]

    monkeypatch.setattr(quantize_module, "chunks", some_chunks)
    found = quantizer.trial(tmp_path / "trial", 5)
    assert asked == ["selection"]
    assert found.seed == 5
    assert 10 < found.perplexity < 1000, "about the vocabulary of 96 random tokens"


@pytest.mark.real_model
def test_an_artifact_that_cannot_speak_is_never_placed(
    speaking_store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quantizer, "lost_in_speech", lambda *_: ["lost 'Paris'"])
    with pytest.raises(ArtifactError, match="whatever the rotation"):
        quantize("smollm2-135m-int8", speaking_store)
    assert not (speaking_store.root / "smollm2-135m" / "smollm2-135m-int8").exists()


def test_only_int8_variants_are_quantized(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="quantize makes int8 onnx variants"):
        quantize("smollm2-135m-fp32", ModelStore(tmp_path))


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m-int8", "smollm2-135m-pruned-int8"])
def test_the_placed_artifact_passes_the_gate_and_knows_paris(name: str, models_root: Path) -> None:
    store = ModelStore(models_root)
    folder = store.artifact_dir(name)
    facts = inspect(folder / "model.onnx")
    assert problems(folder / "model.onnx") == []
    layers = store.catalogue.variant(name).layers
    assert facts.int8_matrices == facts.matrices == 4 * (30 if layers is None else len(layers)) + 1
    encoder = encoder_of(store, "smollm2-135m")
    chat = next(chat for chat in chats("selection", encoder) if "capital of France" in chat.question)
    answer = OnnxRunner(folder, threads=1).generate([chat.prompt_ids], 24, encoder.tokenizer.eos_ids)[0]
    assert "Paris" in encoder.tokenizer.decode(answer)
