"""Artifacts of encoders, made from a small random BERT: the graph against transformers, recipes, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from edge_agent.batching.manifest import read_encoder_manifest
from models.catalogue.families import Catalogue, Family, Source, Variant
from models.cli import app
from models.encoder import artifact
from models.encoder.artifact import make_encoder
from models.encoder.graph import write_encoder
from models.formats.encoder import read_encoder
from models.pipelines.embedding import padded
from models.store.store import ModelStore
from router.base.errors import ArtifactError, InvalidRequest

CONFIG = BertConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
BATCH = [[3], [5, 6, 7, 8, 9], list(range(20, 50)), [95, 0]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(3)
    model = BertModel(CONFIG).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn_like(tensor))  # gains and biases that are not 1 and 0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def expected(source: Path) -> np.ndarray:
    model = BertModel.from_pretrained(source).eval()
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in BATCH]
    found: np.ndarray = torch.stack(rows).numpy()
    return found


def pooled(folder: Path, batch: list[list[int]]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    ids, mask = padded(batch)
    found: np.ndarray = session.run(None, {"input_ids": ids, "mask": mask})[0]
    return found


def test_the_float32_graph_equals_transformers(source: Path, expected: np.ndarray, tmp_path: Path) -> None:
    write_encoder(read_encoder(source), tmp_path, int8=False)
    assert np.abs(pooled(tmp_path, BATCH) - expected).max() < 1e-5


def test_the_8_bit_graph_is_close_and_ignores_company(source: Path, expected: np.ndarray, tmp_path: Path) -> None:
    write_encoder(read_encoder(source), tmp_path, int8=True)
    together = pooled(tmp_path, BATCH)
    cosine = (together * expected).sum(axis=1) / np.linalg.norm(together, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.995
    for index, ids in enumerate(BATCH):
        assert np.abs(pooled(tmp_path, [ids])[0] - together[index]).max() < 1e-5


@pytest.mark.parametrize("int8", [False, True])
def test_padding_is_not_computed(source: Path, tmp_path: Path, int8: bool) -> None:
    model = onnx.load(write_encoder(read_encoder(source), tmp_path, int8=int8), load_external_data=False)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("l1.gelu"))
    onnx.save(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    ids, mask = padded(BATCH)
    _, expanded = session.run(None, {"input_ids": ids, "mask": mask})
    assert expanded.shape == (sum(map(len, BATCH)), CONFIG.intermediate_size)


@pytest.mark.parametrize("int8", [False, True])
def test_what_is_no_number_stays_in_its_text(source: Path, tmp_path: Path, int8: bool) -> None:
    weights = read_encoder(source)
    words = weights.words.copy()
    words[BATCH[1]] = np.nan
    write_encoder(dataclasses.replace(weights, words=words), tmp_path, int8=int8)
    assert np.isfinite(pooled(tmp_path, BATCH)).all(axis=1).tolist() == [True, False, True, True]


def store_of(source: Path, root: Path) -> ModelStore:
    variants = [
        Variant(name="b-fp32", rung=0, quality=1.0, quality_measured="it is", precision="fp32", format="weights"),
        Variant(name="b-fp32-onnx", rung=1, quality=1.0, quality_measured="it is", precision="fp32", format="onnx"),
        Variant(name="b-int8", rung=2, quality=0.9, quality_measured="no", precision="int8", format="onnx"),
    ]
    family = Family(
        name="b",
        title="B",
        task="embed",
        parameters=1000,
        context_tokens=24,
        licence="none",
        sources=(Source(uri=f"dir:{source}"),),
        variants=tuple(variants),
    )
    return ModelStore(root, Catalogue([family]))


def test_an_artifact_is_made_once(source: Path, tmp_path: Path) -> None:
    store, notes = store_of(source, tmp_path), []
    for name in ("b-fp32-onnx", "b-int8"):
        folder = make_encoder(store.catalogue.variant(name), store, note=notes.append)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert (manifest["dimensions"], manifest["context_tokens"], manifest["precision"]) == (64, 24, name[2:6])
        assert not read_encoder_manifest(folder).computes_padding
        store.check_artifact(name)
        before = (folder / "manifest.json").stat().st_mtime_ns
        make_encoder(store.catalogue.variant(name), store, note=notes.append)
        assert (folder / "manifest.json").stat().st_mtime_ns == before
        assert notes[-1] == f"{name}: already made"


def test_an_artifact_of_an_older_recipe_is_made_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, notes = store_of(source, tmp_path), []
    with monkeypatch.context() as older:
        older.setitem(artifact._STEPS, "int8", ("encoder-int8-rows-2",))
        folder = make_encoder(store.catalogue.variant("b-int8"), store)
    before = json.loads((folder / "manifest.json").read_text())["recipe"]
    make_encoder(store.catalogue.variant("b-int8"), store, note=notes.append)
    assert json.loads((folder / "manifest.json").read_text())["recipe"] != before
    assert notes[-1] != "b-int8: already made"


def test_only_the_8_bit_graph_needs_onnx_runtime(source: Path, tmp_path: Path) -> None:
    domains = {}
    for int8 in (False, True):
        folder = tmp_path / str(int8)
        folder.mkdir()
        graph = onnx.load(write_encoder(read_encoder(source), folder, int8=int8), load_external_data=False)
        domains[int8] = {(item.domain, item.version) for item in graph.opset_import}
        kinds = [node.op_type for node in graph.graph.node]
        assert kinds.count("MatMulIntegerToFloat") == kinds.count("QuantizeLinear") == (8 if int8 else 0)
    assert domains == {False: {("", 18)}, True: {("", 18), ("com.microsoft", 1)}}


def test_numbers_far_apart_are_rounded_alike(source: Path, expected: np.ndarray, tmp_path: Path) -> None:
    """A text's rows do not see how large those of another text in the batch are."""
    weights = read_encoder(source)
    words = weights.words.copy()
    words[7] *= 1e4
    write_encoder(dataclasses.replace(weights, words=words), tmp_path, int8=True)
    alone = pooled(tmp_path, [BATCH[2]])[0]
    assert np.abs(pooled(tmp_path, BATCH)[2] - alone).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "says"),
    [({"model_type": "llama"}, "model_type"), ({"hidden_act": "relu"}, "relu"), ({"hidden_size": 0}, "hidden_size")],
)
def test_other_architectures_are_refused(source: Path, tmp_path: Path, change: dict[str, object], says: str) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ArtifactError, match=says):
        read_encoder(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["export", "all-minilm-l6-v2-fp32"],
        ["quantize", "all-minilm-l6-v2-int8"],
        ["prune", "all-minilm-l6-v2", "--keep", "3"],
        ["build", "all-minilm-l6-v2-int8"],
    ],
)
def test_commands_for_models_that_generate_say_what_to_do(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InvalidRequest)
    assert "overspill models pull all-minilm-l6-v2 --prepare" in result.exception.message
