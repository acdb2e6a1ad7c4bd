"""KServe V2 and Triton's generate extension over plain HTTP, as curl and gateways send it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from checking import Checks, Pieces, Server, refused

checks = Checks(())
PROMPT = "The capital of France is"


def call(server: Server, path: str, body: Any = None) -> Any:
    """Return what a path answers, as an open response."""
    headers = {"content-type": "application/json"}
    if server.key:
        headers["authorization"] = f"Bearer {server.key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)  # noqa: S310 - a loopback URL of the harness
    return urllib.request.urlopen(request, timeout=60)  # noqa: S310


@checks.that("GET /v2, /v2/health/live and ready")
def health(server: Server) -> None:
    assert json.load(call(server, "/v2"))["name"]
    assert call(server, "/v2/health/live").status == 200
    assert call(server, "/v2/health/ready").status == 200
    assert call(server, f"/v2/models/{server.whole_model}/ready").status == 200


@checks.that("GET a model's metadata, config and stats")
def described(server: Server) -> None:
    base = f"/v2/models/{server.whole_model}"
    assert json.load(call(server, base))["inputs"]
    assert json.load(call(server, f"{base}/config"))["name"] == server.whole_model
    assert json.load(call(server, f"{base}/stats"))["model_stats"]


@checks.that("POST repository/index")
def index(server: Server) -> None:
    names = [one["name"] for one in json.load(call(server, "/v2/repository/index", {}))]
    assert server.whole_model in names


@checks.that("POST infer with JSON tensors")
def infer(server: Server) -> None:
    told = json.load(call(server, f"/v2/models/{server.whole_model}"))
    two = {tensor["name"]: len(tensor["shape"]) == 2 for tensor in told["inputs"]}
    inputs = [
        {"name": name, "datatype": kind, "shape": [1, 1] if two[name] else [1], "data": [value]}
        for name, kind, value in (("text_input", "BYTES", PROMPT), ("max_tokens", "INT32", 5))
    ]
    reply = json.load(call(server, f"/v2/models/{server.whole_model}/infer", {"id": "a", "inputs": inputs}))
    assert reply["id"] == "a"
    (output,) = [tensor for tensor in reply["outputs"] if tensor["name"] == "text_output"]
    assert output["data"][0]


@checks.that("POST generate")
def generate(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 5}
    reply = json.load(call(server, f"/v2/models/{server.whole_model}/generate", body))
    assert reply["model_name"] == server.whole_model
    assert reply["text_output"]


@checks.that("POST generate_stream: events over time")
def generate_stream(server: Server) -> None:
    pieces = Pieces()
    body = {"text_input": "Once upon a time", "max_tokens": 16}
    with call(server, f"/v2/models/{server.stream_model}/generate_stream", body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply:
            if line.startswith(b"data:"):
                pieces.add(json.loads(line[5:]).get("text_output"))
    pieces.came_over_time()


@checks.that('errors: an unknown model is 404 or 400 with {"error": …}')
def errors(server: Server) -> None:
    error = refused(urllib.error.HTTPError, lambda: call(server, "/v2/models/no-such-model/infer", {"inputs": []}))
    assert error.code in {400, 404}
    assert json.load(error)["error"]


checks.run()
