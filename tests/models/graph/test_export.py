"""The ONNX graph computes what the reference decoder computes: any batch, any past, float32 and packed embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models.catalogue.families import load_catalogue
from models.graph.decoder import Decoder, prefix_kv
from models.graph.export import export, exported, onnx_variant
from models.graph.fused import fuse
from models.graph.graph import OPSET, pack_rows, write_graph
from models.store.store import ModelStore
from router.base.errors import ArtifactError, InvalidRequest
from tests.support.tiny_models import SHAPES, TinyWeights, tiny_config, written

IDS = [1, 17, 5, 88, 3, 42, 42, 9, 60, 2, 31]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graph_equals_the_decoder_in_prefill_and_decode(shape: str, tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config(**SHAPES[shape])))
    runner = written(model, tmp_path)
    decoder = Decoder(model)
    expected = decoder(decoder.fresh(IDS))
    np.testing.assert_allclose(runner.score(IDS), expected.logits[0, 1:], atol=1e-3)
    past_k, past_v = prefix_kv(model, IDS[:-1])
    feeds = runner.feeds(np.array([IDS[-1:]]), (past_k[:, None], past_v[:, None]), np.array([len(IDS) - 1]))
    logits, new_k, new_v = runner.run(feeds)
    np.testing.assert_allclose(logits[0, 0], expected.logits[0, -1], atol=1e-3)
    for index in range(model.config.num_layers):
        np.testing.assert_allclose(new_k[index, 0, :, 0], expected.new_k[index][0, :, -1], atol=1e-4)
        np.testing.assert_allclose(new_v[index, 0, :, 0], expected.new_v[index][0, :, -1], atol=1e-4)


def test_rows_of_different_length_do_not_disturb_each_other(tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config()))
    runner = written(model, tmp_path)
    prompts = [IDS, IDS[:3], [1]]
    alone = [runner.generate([prompt], 6, frozenset())[0] for prompt in prompts]
    assert runner.generate(prompts, 6, frozenset()) == alone
    assert all(len(answer) == 6 for answer in alone)


def test_a_row_ends_at_its_end_of_sequence_token(tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config()))
    runner = written(model, tmp_path)
    whole = runner.generate([IDS], 6, frozenset())[0]
    cut = runner.generate([IDS], 6, frozenset({whole[2]}))[0]
    assert cut == whole[: whole.index(whole[2])]


def test_padding_in_the_past_and_unasked_positions_change_nothing(tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config()))
    runner = written(model, tmp_path)
    k, v = (part[:, None] for part in prefix_kv(model, IDS[:5]))
    tight = runner.feeds(np.array([IDS[5:]]), (k, v), np.array([5]))
    garbage = np.full((*k.shape[:3], 4, k.shape[4]), 7.0, np.float32)
    padded_kv = (np.concatenate([k, garbage], axis=3), np.concatenate([v, garbage], axis=3))
    padded = runner.feeds(np.array([IDS[5:]]), padded_kv, np.array([5]))
    padded["logits_at"] = np.array([[len(IDS) - 6, 0]])
    logits = runner.run(tight)[0][0]
    np.testing.assert_allclose(runner.run(padded)[0][0], logits[[-1, 0]], atol=1e-4)


def test_the_graph_is_valid_onnx_with_dynamic_sizes(tmp_path: Path) -> None:
    path = write_graph(fuse(TinyWeights(tiny_config())), tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    assert {entry.version for entry in model.opset_import} == {OPSET}
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert dims["attention_bias"] == ["B", 1, "S", "P+S"]
    assert dims["past_k.1"] == ["B", 2, "P", 16]
    assert dims["new_v.0"] == ["B", 2, "S", 16]
    assert dims["logits"] == ["B", "L", 96]


def test_packed_rows_unpack_exactly() -> None:
    table = np.random.default_rng(0).standard_normal((50, 64), np.float32) * np.float32(3)
    table[7] = 0
    packed, scale = pack_rows(table)
    assert packed.shape == (50, 16)
    top = np.floor(packed.astype(np.float32) / 2**24)
    rest = (packed - (top.astype(np.int32) << 24)).astype(np.float32)
    digits = [top]
    for bits in (16, 8):
        digits.append(np.floor(rest / 2**bits))
        rest = rest - digits[-1] * 2**bits
    values = np.concatenate([digits[0], digits[1] - 128, digits[2] - 128, rest - 128], axis=1)
    np.testing.assert_array_equal(values, np.rint(table / scale[:, None]))


def test_only_weights_are_exported() -> None:
    store = ModelStore(Path("unused"), load_catalogue())
    assert onnx_variant(store, "smollm2-135m-fp32").name == "smollm2-135m-fp32-onnx"
    assert onnx_variant(store, "smollm2-135m-fp32-onnx").name == "smollm2-135m-fp32-onnx"
    with pytest.raises(InvalidRequest, match="overspill models quantize"):
        onnx_variant(store, "smollm2-135m-int8")


def test_a_missing_export_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="overspill models export smollm2-135m-fp32"):
        exported("smollm2-135m-fp32", ModelStore(tmp_path, load_catalogue()))


@pytest.mark.real_model
def test_the_exported_model_is_whole_and_reused(models_root: Path) -> None:
    store = ModelStore(models_root)
    folder = export("smollm2-135m-fp32", store)
    store.check_artifact(onnx_variant(store, "smollm2-135m-fp32"))
    notes: list[str] = []
    assert export("smollm2-135m-fp32", store, note=notes.append) == folder
    assert notes == ["smollm2-135m-fp32-onnx: already exported"]
