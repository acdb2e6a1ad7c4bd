"""GuideLLM: a short load with its defaults, and figures of every request."""

from __future__ import annotations

import json
from typing import Any

from checking import Checks, Server, finished

checks = Checks(("guidellm", "transformers"))


def run(server: Server, form: str) -> dict[str, Any]:
    """Run a short load over an API, and return its one benchmark."""
    path = server.folder / f"guidellm-{form.strip('/').replace('/', '-')}.json"
    path.unlink(missing_ok=True)
    argv = ["guidellm", "run", "--disable-console-interactive"]
    argv += ["--backend", f"kind=openai_http,target={server.url},api_key={server.key},request_format={form}"]
    argv += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    argv += ["--tokenizer", f"kind=hf_auto,model={server.tokenizer}"]
    argv += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12", "--output", f"kind=json,path={path}"]
    finished(argv)
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    errors = [str(request["info"]["error"])[:300] for request in benchmark["requests"]["errored"]]
    # Its own limit of 4 requests may end the last of them on a busy machine.
    assert totals["successful"] >= 3, f"{totals}: {errors[:1]}"
    assert not errors, errors[0]
    told: dict[str, Any] = benchmark["metrics"]
    return told


@checks.that("chat completions, with its own check of the server's health")
def chat(server: Server) -> None:
    told = run(server, "/v1/chat/completions")
    assert told["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert told["output_token_count"]["successful"]["mean"] == 12


@checks.that("completions")
def completions(server: Server) -> None:
    assert run(server, "/v1/completions")["time_to_first_token_ms"]["successful"]["mean"] > 0


@checks.that("responses")
def responses(server: Server) -> None:
    assert run(server, "/v1/responses")["output_token_count"]["successful"]["mean"] > 0


checks.run()
