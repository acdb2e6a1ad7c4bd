"""Every processor calibrates and rounds alike: what sums of float32 leave open is not what a model says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import REPOSITORY

PREPARED = """
import hashlib
from models.graph.fused import fuse
from models.int8.rounding import prepare
from tests.models.int8.test_quantize import SEQUENCES
from tests.support.tiny_models import SHAPES, TinyWeights, tiny_config

for shape in SHAPES:
    ready = prepare(fuse(TinyWeights(tiny_config(**SHAPES[shape]))), SEQUENCES, seed=7)
    found = hashlib.sha256()
    for key, matrix in sorted(ready.plan.matrices.items()):
        found.update(matrix.values.tobytes() + matrix.scale.tobytes() + repr(matrix.input_scale).encode())
    found.update(ready.prefix.k.tobytes() + ready.prefix.v.tobytes() + ready.prefix.logits.tobytes())
    print(shape, found.hexdigest())
"""


def prepared(**processor: str) -> str:
    """Return digests of what is made of tiny models where libraries are told to compute as on another processor."""
    told = {**os.environ, **processor}
    return subprocess.run(
        [sys.executable, "-c", PREPARED], cwd=REPOSITORY, env=told, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.process
@pytest.mark.slow
def test_other_instructions_and_threads_make_the_same_artifact() -> None:
    here = prepared(OMP_NUM_THREADS="1")
    assert here.count("\n") > 1
    plain = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    assert prepared(OMP_NUM_THREADS="2", OPENBLAS_CORETYPE="Nehalem", **plain) == here
