"""An encoder on ONNX Runtime: batches of any size give the same vectors, and large ones leave no memory behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent.batching.encoder import OnnxEncoder, load_encoder
from edge_agent.batching.manifest import read_encoder_manifest
from hardware_profiles.loader import RuntimeOptions
from models.store.store import ModelStore
from tests.support.paths import REPOSITORY

GIVEN_BACK_BYTES = 30 << 20  # of what 16 texts of 256 tokens take

pytestmark = pytest.mark.real_model


def loaded(models_root: Path) -> OnnxEncoder:
    folder = ModelStore(models_root).artifact_dir("all-minilm-l6-v2-int8")
    return load_encoder(folder, read_encoder_manifest(folder), RuntimeOptions(intra_op_threads=1), None)


@pytest.fixture
def encoder(models_root: Path) -> OnnxEncoder:
    return loaded(models_root)


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


MEASURED = """
import dataclasses, sys
from pathlib import Path
import psutil
from tests.edge_agent.batching.test_encoder import loaded, texts

giving = loaded(Path(sys.argv[1]))
for one in (giving, dataclasses.replace(giving, large=None), giving):
    one.encode(texts(16, 256))
    print(psutil.Process().memory_info().rss)
"""


@pytest.mark.process
def test_the_memory_of_large_batches_is_given_back(models_root: Path) -> None:
    """In a process of its own: what other tests let go of there would be taken again, or given back meanwhile."""
    told = subprocess.run(
        [sys.executable, "-c", MEASURED, str(models_root)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    first, kept, last = map(int, told.stdout.split())
    assert kept - first > GIVEN_BACK_BYTES
    assert kept - last > GIVEN_BACK_BYTES
