"""The search finds layers that do nothing, its perplexities are the decoder's, and it refuses what cannot be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.graph.decoder import Decoder
from models.graph.fused import FusedModel, fuse
from models.prune.prune import prune
from router.base.errors import ArtifactError
from tests.support.tiny_models import TinyWeights, tiny_config

SEQUENCES = [[1, *np.random.default_rng(seed).integers(3, 96, 20).tolist()] for seed in range(3)]


def _model(idle: int) -> FusedModel:
    """Five layers, of which one adds nothing to the residual stream."""
    model = fuse(TinyWeights(tiny_config(num_layers=5)))
    layers = list(model.layers)
    quiet = replace(layers[idle], o=np.zeros_like(layers[idle].o), down=np.zeros_like(layers[idle].down))
    layers[idle] = quiet
    return replace(model, layers=tuple(layers))


def _perplexity(model: FusedModel) -> float:
    losses = []
    for ids in SEQUENCES:
        decoder = Decoder(model)
        logits = decoder(decoder.fresh(ids)).logits[0, 1:-1]
        losses.append(F.cross_entropy(logits, torch.tensor(ids[2:]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


@pytest.mark.parametrize("idle", [0, 2, 4])
def test_a_layer_that_does_nothing_is_free_to_drop(idle: int) -> None:
    model = _model(idle)
    whole, without = prune(model, SEQUENCES, 4, stride=1)
    free = model.layers[:idle] + model.layers[idle + 1 :]
    assert _perplexity(replace(model, layers=free)) == pytest.approx(whole.perplexity, rel=1e-4)
    assert without.perplexity <= whole.perplexity * 1.0001


def test_each_step_reports_the_perplexity_of_what_is_left() -> None:
    model = _model(2)
    steps = prune(model, SEQUENCES, 2, stride=1)
    assert [len(step.layers) for step in steps] == [5, 4, 3, 2]
    for step in steps:
        kept = replace(model, layers=tuple(model.layers[index] for index in step.layers))
        assert _perplexity(kept) == pytest.approx(step.perplexity, rel=1e-3)
    for before, after in itertools.pairwise(steps):
        assert set(before.layers) - set(after.layers) == {after.dropped}


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ArtifactError, match="cannot keep 6 of 5 layers"):
        prune(_model(0), SEQUENCES, 6)
    with pytest.raises(ArtifactError, match="at least one sequence of three tokens"):
        prune(_model(0), [[1, 2]], 2)
