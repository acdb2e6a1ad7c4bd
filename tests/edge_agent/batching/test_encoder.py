"""An encoder on ONNX Runtime: batches of any size give the same vectors, and large ones leave no memory behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_agent.batching.encoder import OnnxEncoder, load_encoder
from edge_agent.batching.manifest import read_encoder_manifest
from hardware_profiles.loader import RuntimeOptions
from models.store.store import ModelStore

GIVEN_BACK_BYTES = 30 << 20  # of what 16 texts of 256 tokens take

pytestmark = pytest.mark.real_model


@pytest.fixture
def encoder(models_root: Path) -> OnnxEncoder:
    folder = ModelStore(models_root).artifact_dir("all-minilm-l6-v2-int8")
    return load_encoder(folder, read_encoder_manifest(folder), RuntimeOptions(intra_op_threads=1), None)


def texts(count: int, tokens: int) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(5).integers(1000, 20_000, (count, tokens)).tolist()
    return rows


def test_batches_of_all_sizes_give_the_same_vectors(encoder: OnnxEncoder) -> None:
    given = texts(12, 128)
    together = encoder.encode(given)
    assert together.shape == (12, 384)
    assert together.dtype == np.float32
    apart = np.concatenate([encoder.encode([ids]) for ids in given])
    assert np.abs(together - apart).max() < 1e-4


def test_the_memory_of_large_batches_is_given_back(encoder: OnnxEncoder) -> None:
    keeping = dataclasses.replace(encoder, large=None)
    resident = []
    for one in (encoder, keeping, encoder):
        one.encode(texts(16, 256))
        resident.append(psutil.Process().memory_info().rss)
    assert resident[1] - resident[0] > GIVEN_BACK_BYTES
    assert resident[1] - resident[2] > GIVEN_BACK_BYTES
