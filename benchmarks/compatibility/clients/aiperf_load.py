"""NVIDIA's AIPerf: a short load, and figures of every request."""

from __future__ import annotations

import json
from typing import Any

from checking import Checks, Server, finished

checks = Checks(("aiperf", "transformers"))


def profile(server: Server, *options: str) -> dict[str, Any]:
    """Run a short load, and return AIPerf's own summary."""
    folder = server.folder / f"aiperf-{'-'.join(options).replace('/', '-').strip('-')}"
    argv = ["aiperf", "profile", "--model", server.model, "--url", server.url, "--api-key", server.key]
    argv += ["--tokenizer", str(server.tokenizer), "--concurrency", "2", "--request-count", "4", "--isl", "24"]
    argv += ["--osl", "12", "--ui", "none", "--artifact-dir", str(folder), "--num-dataset-entries", "4", *options]
    finished(argv)
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    told: dict[str, Any] = json.loads(found[-1].read_text())
    assert not told.get("error_summary"), told["error_summary"]
    assert told["request_count"]["avg"] == 4, told["request_count"]
    return told


@checks.that("chat, streamed: time to the first token of each")
def chat(server: Server) -> None:
    told = profile(server, "--endpoint-type", "chat", "--streaming")
    assert told["time_to_first_token"]["avg"] > 0
    assert told["inter_token_latency"]["avg"] > 0


@checks.that("completions, streamed")
def completions(server: Server) -> None:
    assert profile(server, "--endpoint-type", "completions", "--streaming")["time_to_first_token"]["avg"] > 0


@checks.that("chat, whole")
def whole(server: Server) -> None:
    assert profile(server, "--endpoint-type", "chat")["request_latency"]["avg"] > 0


@checks.that("the server's own token counts (--use-server-token-count)")
def counts(server: Server) -> None:
    told = profile(server, "--endpoint-type", "chat", "--streaming", "--use-server-token-count")
    assert 1 <= told["output_sequence_length"]["avg"] <= 12


checks.run()
