"""What `benchmarks.gpu` runs beside its figures: the commands that tell the owner of a GPU that all of it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edge_agent.runtime.protocol import Runtime, RuntimeRequest, StepInput
from edge_agent.runtime.registry import open_runtime
from examples.demo.processes import overspill
from hardware_profiles.loader import RuntimeOptions
from models.store.store import ModelStore
from models.text.tokenizer import Tokenizer
from router.base.errors import OverspillError

FAMILY = "smollm2-135m"
INT8 = f"{FAMILY}-int8"
AGREE = 0.9  # of the tokens; another order of sums decides near ties
STEPS, CONTEXT_TOKENS, CHUNK_TOKENS = 48, 512, 64
_PROMPT = "The capital of France is Paris. Water boils at one hundred degrees. The harbour town woke slowly, and"


@dataclass(frozen=True)
class Checked:
    """One check, and the end of what it said."""

    name: str
    passed: bool
    said: str


def checks(device: str) -> list[Checked]:
    """Run all of them on a device, `cuda` or `cpu`."""
    ranks = min(2, torch.cuda.device_count()) if device == "cuda" else 1
    engine = [*overspill("cloud", "check", "--start-engines", "--model", FAMILY, "--device", device)]
    found = [_ran("the engine computes there what float32 does", engine)]
    if ranks == 2:
        found.append(_ran("two ranks over NCCL do", [*engine, "--tensor-parallel", "2"]))
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-rs", "-p", "no:randomly", "tests/router/base/test_cuda.py"]
    calls = _ran("the tests of CUDA calls", tests)
    if device == "cuda" and re.search(r"\bskipped\b", calls.said):
        calls = Checked(calls.name, passed=False, said=f"skipped where nothing may be: {calls.said}")
    return [*found, calls, _tensorrt(device)]


def _ran(name: str, argv: Sequence[str]) -> Checked:
    run = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    return Checked(name, run.returncode == 0, " / ".join(lines[-3:])[:600])


def _tensorrt(device: str) -> Checked:
    """Execute the INT8 artifact with TensorRT and with ONNX Runtime on the CPU, fed the same tokens."""
    name = "INT8 under TensorRT beside ONNX Runtime"
    store = ModelStore()
    if device == "cuda":
        options = RuntimeOptions(name="tensorrt")
        size = ["--batch", "1", "--context", str(CONTEXT_TOKENS), "--chunk", str(CHUNK_TOKENS)]
        built = _ran(name, overspill("models", "build", INT8, *size))
        if not built.passed:
            return built
    else:
        options = RuntimeOptions()
    try:
        ids = Tokenizer.from_gguf(store.source_path(FAMILY)).encode(_PROMPT)
        plain = _continue(RuntimeOptions(), store, ids, ())
        said = [int(row.argmax()) for row in plain]
        logits = _continue(options, store, ids, said)
    except OverspillError as error:
        return Checked(name, passed=False, said=error.message)
    agree = float(np.mean([int(row.argmax()) == token for row, token in zip(logits, said, strict=True)]))
    gap = max(float(np.abs(one - other).max()) for one, other in zip(logits, plain, strict=True))
    told = f"{agree:.1%} of {len(said)} tokens alike, logits within {gap:.2f}"
    return Checked(name, agree >= AGREE, told)


def _continue(
    options: RuntimeOptions, store: ModelStore, ids: Sequence[int], said: Sequence[int]
) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Logits of each step after a prompt, fed what was `said`, or its own choice where nothing was."""
    request = RuntimeRequest(store.artifact_dir(INT8), options, 1, CONTEXT_TOKENS, CHUNK_TOKENS)
    runtime: Runtime = open_runtime(request)
    try:
        sequence, _ = runtime.open(ids, exact=True)
        rows = [runtime.forward([StepInput(sequence, list(ids))])[0].copy()]
        for place in range(STEPS - 1):
            token = said[place] if said else int(rows[-1].argmax())
            rows.append(runtime.forward([StepInput(sequence, [token])])[0].copy())
        return rows
    finally:
        runtime.close()
