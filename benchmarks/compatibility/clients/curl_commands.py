"""curl, and what proxies and scripts do to a server: HTTP/1.0, upgrades, odd paths, health checks."""

from __future__ import annotations

import json
import os
import subprocess
import time

from checking import Checks, Server

CURL = os.environ.get("CURL", "curl")
VERSION = subprocess.run([CURL, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]

checks = Checks((), {"curl": VERSION})


def curl(server: Server, path: str, *options: str, body: object = None) -> tuple[int, dict[str, str], str]:
    """Return status, headers (names in lower case) and body of one request."""
    argv = [CURL, "--silent", "--show-error", "--max-time", "60", "--dump-header", "-", *options]
    argv += ["--header", f"authorization: Bearer {server.key}"] if server.key else []
    if body is not None:
        argv += ["--header", "content-type: application/json", "--data-binary", json.dumps(body)]
    done = subprocess.run([*argv, server.url + path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    head, text = "", done.stdout  # its lines end as \n here
    while text.startswith("HTTP/") and (not head or head.split()[1][0] in "13"):  # 100, 101 and redirects come first
        head, _, text = text.partition("\n\n")
    lines = head.splitlines()
    fields = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in lines[1:] if ":" in line}
    return int(lines[0].split()[1]), fields, text


def ask(server: Server, **more: object) -> dict[str, object]:
    return {"model": server.model, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, **more}


@checks.that("a completion")
def plain(server: Server) -> None:
    status, fields, text = curl(server, "/v1/completions", body=ask(server))
    assert status == 200, text
    assert fields["content-type"].startswith("application/json")
    assert "Paris" in json.loads(text)["choices"][0]["text"]


@checks.that("-N: a stream arrives as it is made")
def stream(server: Server) -> None:
    argv = [CURL, "-sSN", "--max-time", "60", "-H", f"authorization: Bearer {server.key}"]
    argv += ["-H", "content-type: application/json", "-d", json.dumps(ask(server, stream=True, max_tokens=20))]
    times: list[float] = []
    with subprocess.Popen([*argv, f"{server.url}/v1/completions"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        last = b""
        for line in process.stdout:
            if line.startswith(b"data:"):
                times.append(time.perf_counter())
                last = line
    assert last.strip() == b"data: [DONE]"
    assert len(times) > 4
    assert times[-1] - times[0] > 0.02


@checks.that("--http1.0: no chunks, the connection ends the body")
def http_1_0(server: Server) -> None:
    status, fields, text = curl(server, "/v1/completions", "--http1.0", body=ask(server))
    assert status == 200, text
    assert "transfer-encoding" not in fields
    assert "Paris" in json.loads(text)["choices"][0]["text"]
    status, fields, text = curl(server, "/v1/completions", "--http1.0", body=ask(server, stream=True))
    assert status == 200, text
    assert "transfer-encoding" not in fields
    assert text.rstrip().endswith("data: [DONE]")


@checks.that("--http2 on plain HTTP: an upgrade that is not taken is ignored")
def h2c(server: Server) -> None:
    status, _, text = curl(server, "/v1/completions", "--http2", body=ask(server))
    assert status == 200, text
    assert "Paris" in json.loads(text)["choices"][0]["text"]


@checks.that("--compressed")
def compressed(server: Server) -> None:
    status, _, text = curl(server, "/v1/models", "--compressed")
    assert status == 200
    assert json.loads(text)["data"]


@checks.that("Expect: 100-continue with a large body")
def expect(server: Server) -> None:
    prompt = "The capital of France is"
    body = ask(server, prompt=prompt, user="x" * 20_000)
    status, _, text = curl(server, "/v1/completions", "--header", "expect: 100-continue", body=body)
    assert status == 200, text


@checks.that("a body in chunks")
def chunked(server: Server) -> None:
    status, _, text = curl(server, "/v1/completions", "--header", "transfer-encoding: chunked", body=ask(server))
    assert status == 200, text


@checks.that("GET /health, without a key")
def health(server: Server) -> None:
    stranger = Server(**{**server.__dict__, "key": ""})
    status, _, text = curl(stranger, "/health")
    assert status == 200, text


@checks.that("GET /ping and /version")
def ping(server: Server) -> None:
    assert curl(server, "/ping")[0] == 200
    status, _, text = curl(server, "/version")
    assert status == 200, text
    assert json.loads(text)["version"]


@checks.that("GET /openapi.json names the paths")
def openapi(server: Server) -> None:
    status, _, text = curl(server, "/openapi.json")
    assert status == 200, text[:200]
    assert "/v1/chat/completions" in json.loads(text)["paths"]


@checks.that("POST /tokenize and /detokenize")
def tokenize(server: Server) -> None:
    status, _, text = curl(server, "/tokenize", body={"model": server.model, "prompt": "The capital of France is"})
    assert status == 200, text
    told = json.loads(text)
    assert told["count"] == len(told["tokens"])
    status, _, text = curl(server, "/detokenize", body={"model": server.model, "tokens": [504, 3575]})
    assert status == 200, text
    assert json.loads(text)["prompt"] == "The capital"


@checks.that("GET /metrics: Prometheus")
def metrics(server: Server) -> None:
    status, fields, text = curl(server, "/metrics")
    assert status == 200
    assert fields["content-type"].startswith(("text/plain", "application/openmetrics-text"))
    assert "# TYPE" in text


@checks.that("a trailing slash")
def slash(server: Server) -> None:
    status, _, text = curl(server, "/v1/models/", "--location")
    assert status == 200, text


@checks.that("HEAD and OPTIONS are answered without a body of an error")
def head(server: Server) -> None:
    argv = [CURL, "-sS", "--head", "--max-time", "20", "-H", f"authorization: Bearer {server.key}"]
    told = subprocess.run([*argv, f"{server.url}/health"], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split()[1] in {"200", "405"}


@checks.that("x-request-id is sent back")
def request_id(server: Server) -> None:
    _, fields, _ = curl(server, "/v1/models", "--header", "x-request-id: mine-1")
    assert fields.get("x-request-id") == "mine-1"


@checks.that("what is too long is refused as such: 414 or 431, a broken body 400, no path 404, wrong method 405")
def refusals(server: Server) -> None:
    assert curl(server, "/v1/models?x=" + "y" * 100_000)[0] in {400, 414, 431}
    assert curl(server, "/v1/models", "--header", "x-long: " + "y" * 100_000)[0] in {400, 431}
    status, _, text = curl(server, "/v1/completions", "--header", "content-type: application/json", "--data", "{")
    assert status in {400, 422}, text
    assert "error" in json.loads(text)
    assert curl(server, "/v1/nothing")[0] == 404
    assert curl(server, "/v1/completions")[0] == 405


checks.run()
