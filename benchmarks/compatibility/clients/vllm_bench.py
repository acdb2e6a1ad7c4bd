"""`vllm bench serve`, the load generator that vLLM brings: every answer is to have the length that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from checking import Checks, NotRunError, Server, finished

PYTHON = os.environ.get("OVERSPILL_LIVE_VLLM", "")
REQUESTS, TOKENS = 8, 16


def version() -> str:
    script = "import importlib.metadata as m; print(m.version('vllm'))"
    return subprocess.run([PYTHON, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


checks = Checks((), {"vllm": version()} if PYTHON else {})


def bench(server: Server, backend: str, path: str, *more: str, url: str = "", model: str = "") -> dict[str, Any]:
    """Run it, and return its result."""
    if not PYTHON:
        raise NotRunError("OVERSPILL_LIVE_VLLM is not set: it names the Python of the environment with vLLM")
    result = Path(server.folder) / "vllm-bench.json"
    result.unlink(missing_ok=True)
    argv = [PYTHON, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend, "--endpoint", path]
    argv += ["--base-url", url or server.url, "--model", model or server.model, "--tokenizer", str(server.tokenizer)]
    argv += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", str(TOKENS)]
    argv += ["--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--disable-tqdm"]
    argv += ["--save-result", "--save-detailed", "--result-filename", str(result), *more]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": ""}
    finished(argv, env={**os.environ, **quiet, "OPENAI_API_KEY": server.key}, cwd=server.folder)
    told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    assert told["completed"] == REQUESTS, [error[-200:] for error in told["errors"] if error][:1]
    return told


@checks.that("--backend openai-chat")
def chat(server: Server) -> None:
    told = bench(server, "openai-chat", "/v1/chat/completions", "--ignore-eos")
    assert told["total_output_tokens"] == REQUESTS * TOKENS
    assert told["median_ttft_ms"] > 0


@checks.that("--backend vllm, at a rate, counting promises that were kept")
def completions(server: Server) -> None:
    told = bench(server, "vllm", "/v1/completions", "--ignore-eos", "--request-rate", "8", "--goodput", "ttft:60000")
    assert told["total_output_tokens"] == REQUESTS * TOKENS
    assert told["request_goodput"] > 0


@checks.that("--backend openai-embeddings")
def embeddings(server: Server) -> None:
    server.wants_embeddings()
    bench(server, "openai-embeddings", "/v1/embeddings", url=server.embeddings_url, model=server.embeddings_model)


checks.run()
