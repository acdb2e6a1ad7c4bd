"""The servers that `benchmarks/engine.py` compares: how each is started, and what it lacks where it cannot be."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.live.other_formats import write_hf_directory, write_q8_0
from examples.demo.processes import Child, free_port, overspill
from models.store.store import ModelStore

FAMILY = "smollm2-135m"
_LLAMA = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.model_alias = sys.argv[3]
params.hostnames = ["127.0.0.1"]
params.port = int(sys.argv[2])
params.n_parallel = int(sys.argv[4])
params.n_ctx = int(sys.argv[5]) * params.n_parallel
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[6])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(3600)
"""


@dataclass
class Server:
    """One server to measure: its child process, and where it listens."""

    name: str
    child: Child
    url: str
    health: str

    def pause(self) -> None:
        """Keep it from every core while others are measured."""
        os.killpg(self.child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself; whoever asks it next says so
            os.killpg(self.child.pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the CPU time that it and its children have taken so far."""
        first = psutil.Process(self.child.pid)
        times = [process.cpu_times() for process in (first, *first.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))


@dataclass(frozen=True)
class Pythons:
    """The interpreters of environments with `vllm` and with `xllamacpp`; None where there is none."""

    vllm: Path | None
    llama: Path | None


def servers(names: list[str], pythons: Pythons, folder: Path, *, slots: int, context_tokens: int) -> list[Server]:
    """Prepare the named servers; those whose environment is not given are left out, which is said.

    Args:
        folder: for logs and for weights in other formats.
        slots: sequences that llama.cpp computes side by side; the others find their own number.
        context_tokens: window of each sequence.
    """
    found = []
    for name in names:
        python = {"vllm": pythons.vllm, "llama": pythons.llama}.get(name.split("-")[0].split(".")[0])
        if not name.startswith("overspill-") and python is None:
            print(f"{name} is left out: no interpreter with it was named", flush=True)
            continue
        port = free_port()
        argv, env = _command(name, python, folder, port, (slots, context_tokens))
        base = f"http://127.0.0.1:{port}"
        health = f"{base}/health/ready" if python is None else f"{base}/health"
        found.append(Server(name, Child(name, argv, folder / f"{name}.log", env), base, health))
    return found


def _command(
    name: str, python: Path | None, folder: Path, port: int, sizes: tuple[int, int]
) -> tuple[list[str], Mapping[str, str]]:
    store = ModelStore()
    source = store.source_path(FAMILY)
    # The variables of this process are for this process: every server chooses its threads itself.
    env = {key: "" for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if key in os.environ}
    if python is None:
        dtype = {"fp32": "float32", "bf16": "bfloat16"}.get(name.removeprefix("overspill-"), name[len("overspill-") :])
        argv = overspill("cloud", "serve", "--model", FAMILY, "--port", str(port), "--dtype", dtype)
        return argv, {**env, "OVERSPILL_CLOUD__SERVER__LOG_LEVEL": "warning"}
    if name.startswith("vllm"):
        weights = folder / "smollm2-hf"
        write_hf_directory(source, store.artifact_dir(f"{FAMILY}-int8"), weights)
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--served-model-name", FAMILY, "--max-model-len", str(sizes[1])]
        argv += ["--enforce-eager"] if name.endswith("eager") else []
        return argv, {**env, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    weights = source
    if name.endswith("q8_0"):
        weights = folder / f"{FAMILY}-q8_0.gguf"
        write_q8_0(source, weights)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    numbers = [str(number) for number in (*sizes, cores)]
    return [str(python), "-c", _LLAMA, str(weights), str(port), FAMILY, *numbers], env
