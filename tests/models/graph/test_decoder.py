"""The reference decoder is the model: transformers agrees, the cache changes nothing, rotations change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.formats.weights import open_weights
from models.graph.decoder import Decoder, packed, prefix_kv
from models.graph.fused import FusedModel, fuse
from models.graph.rotate import hadamard, orthogonal, power_of_two_in, rotate, turn_down
from models.int8.calibrate import observe
from models.int8.smooth import factors, smooth
from tests.support.tiny_models import SHAPES, TinyWeights, tiny_config

IDS = [1, 17, 5, 88, 3, 42, 42, 9, 60, 2, 31]


def _logits(model: FusedModel, ids: list[int]) -> np.ndarray:
    decoder = Decoder(model)
    return decoder(decoder.fresh(ids)).logits[0].numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_smoothing_and_hadamard_change_no_logit(shape: str) -> None:
    plain = fuse(TinyWeights(tiny_config(**SHAPES[shape])))
    turned = rotate(plain, seed=7)
    smoothed = smooth(turned, observe(turned, [IDS, IDS[::-1]]).largest())
    blocked = replace(smoothed, layers=tuple(turn_down(layer, 32) for layer in smoothed.layers))
    expected = _logits(plain, IDS)
    assert np.abs(expected).max() > 0.5
    for step in (turned, smoothed, blocked):
        np.testing.assert_allclose(_logits(step, IDS), expected, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cached_past_changes_no_logit(shape: str) -> None:
    model = fuse(TinyWeights(tiny_config(**SHAPES[shape])))
    decoder = Decoder(model)
    whole = _logits(model, IDS)
    past = prefix_kv(model, IDS[:4])
    rest = decoder(decoder.fresh(IDS[4:], past)).logits[0].numpy()
    np.testing.assert_allclose(rest, whole[4:], atol=1e-4)


def test_sequences_packed_side_by_side_do_not_see_each_other() -> None:
    model = fuse(TinyWeights(tiny_config()))
    decoder = Decoder(model)
    inputs = packed(model, [IDS, IDS[3:]])
    inputs = inputs._replace(logits_at=torch.arange(inputs.input_ids.shape[1])[None])
    together = decoder(inputs).logits[0].numpy()
    np.testing.assert_allclose(together[: len(IDS)], _logits(model, IDS), atol=1e-4)
    np.testing.assert_allclose(together[len(IDS) :], _logits(model, IDS[3:]), atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(architecture: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_of, model_of = kinds[architecture]
    shape = {"head_dim": 32} if architecture == "qwen3" else {}
    config = config_of(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **shape,
    )
    theirs = model_of(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    ours = fuse(open_weights(tmp_path))
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(_logits(ours, IDS), expected, atol=1e-4)
    np.testing.assert_allclose(_logits(rotate(ours), IDS), expected, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 8, 12, 72, 96, 7])
def test_orthogonal_is_orthogonal(size: int) -> None:
    turn = orthogonal(size, seed=3)
    np.testing.assert_allclose(turn @ turn.T, np.eye(size), atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_is_its_own_inverse(size: int) -> None:
    np.testing.assert_allclose(hadamard(size) @ hadamard(size), np.eye(size), atol=1e-6)
    assert not hadamard(size).flags.writeable


def test_the_block_is_the_largest_power_of_two_that_divides() -> None:
    assert power_of_two_in(1536) == 512
    assert power_of_two_in(1536, cap=128) == 128
    assert power_of_two_in(8960, cap=128) == 128
    assert power_of_two_in(4864) == 256
    assert power_of_two_in(7) == 1


def test_smoothing_factors_survive_dead_channels() -> None:
    found = factors(np.array([0.0, 1.0, 100.0], np.float32), np.array([1.0, 0.0, 1.0], np.float32))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert np.log(found).mean() == pytest.approx(0.0, abs=1e-5)
