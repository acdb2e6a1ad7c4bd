"""The first position is found to settle where its keys and values stop depending on the token that stands there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from models.graph.decoder import Decoder
from models.graph.fused import fuse
from models.graph.graph import write_graph
from models.int8.first_token import first_token, settled_layer
from models.int8.rounding import prepare
from tests.support.tiny_models import TinyWeights, place, tiny_config


def test_what_is_shipped_is_what_float32_computes() -> None:
    model = fuse(TinyWeights(tiny_config()))
    shipped = first_token(model, 5)
    decoder = Decoder(model)
    step = decoder(decoder.fresh([5]))
    for layer in range(2):
        np.testing.assert_allclose(shipped.k[layer], step.new_k[layer][0].numpy(), atol=1e-5)
        np.testing.assert_allclose(shipped.v[layer], step.new_v[layer][0].numpy(), atol=1e-5)
    np.testing.assert_allclose(shipped.logits, step.logits[0, 0].numpy(), atol=1e-4)
    assert shipped.token_ids == (5,)
    assert shipped.settled_layer is None  # random weights have no sink


def test_the_settled_layer_is_the_first_of_all_that_are_alike() -> None:
    random = np.random.default_rng(1)
    alike = np.broadcast_to(random.standard_normal((4, 1, 2, 1, 8)), (4, 30, 2, 1, 8))
    other = random.standard_normal((4, 30, 2, 1, 8))

    def of(*layers: bool) -> int | None:
        keys = np.where(np.array(layers)[:, None, None, None, None], alike, other).astype(np.float32)
        return settled_layer(keys, (alike + 0.01 * other).astype(np.float32))

    assert of(False, False, True, True) == 2
    assert of(True, False, True, True) == 2
    assert of(True, True, True, True) == 0
    assert of(True, True, True, False) is None


def test_a_runner_takes_the_settled_layers_for_any_first_token(tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config()))
    ready = prepare(model, [[1, *range(5, 40)], [1, *range(40, 60)]], seed=7)
    assert ready.prefix is not None
    write_graph(ready.model, tmp_path, ready.plan)
    runner = place(ready.model, tmp_path, dataclasses.replace(ready.prefix, settled_layer=0))
    # With every layer settled, whatever stands first is the shipped token.
    np.testing.assert_array_equal(runner.score([9, 5, 6, 7]), runner.score([1, 5, 6, 7]))
