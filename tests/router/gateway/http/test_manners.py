"""What clients, proxies, probes and scrapers expect of any HTTP server, on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families

from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.deps import GatewayDeps
from router.gateway.listener import Listener, bind
from tests.support.gateway_fakes import FAMILY, client_of, gateway_deps

CHAT = {"model": FAMILY, "messages": [{"role": "user", "content": "say a b c"}]}
LONG = {"model": FAMILY, "messages": [{"role": "user", "content": "say " + "word " * 2000}]}
UPGRADE_CLIENT = Path(__file__).parent / "UpgradingClient.java"


@contextlib.asynccontextmanager
async def gateway(deps: GatewayDeps | None = None, **limits) -> AsyncIterator[int]:
    with bind("127.0.0.1", 0, "gateway") as bound:
        async with Listener(create_app(deps or gateway_deps()), ConnectionLimits(**limits)).running(bound):
            yield bound.getsockname()[1]


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def post(path: str, body: dict, version: str = "1.1", lines: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n{lines}"
    return f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


# ── probes and what they are told ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_of_other_servers_are_answered_without_a_key(path: str) -> None:
    async with client_of(gateway_deps(api_keys={"k": 0})) as http:
        assert (await http.get(path)).status_code == 200
        assert (await http.head(path)).status_code == 200
    async with client_of(gateway_deps(closed=lambda: "starting")) as http:
        reply = await http.get(path)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


async def test_the_version_is_told_to_who_may_come_in() -> None:
    async with client_of(gateway_deps(api_keys={"k": 0})) as http:
        assert (await http.get("/version")).status_code == 401
        told = await http.get("/version", headers={"authorization": "Bearer k"})
    assert set(told.json()) == {"version"}
    assert told.json()["version"].count(".") >= 1


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/models/", "/health/ready/", "/v2/", "/v2/models/tiny/", "/v1/models/tiny//"])
async def test_a_trailing_slash_changes_nothing(path: str) -> None:
    async with client_of(gateway_deps()) as http:
        reply, bare = await http.get(path), await http.get(path.rstrip("/"))
    assert (reply.status_code, reply.json()) == (200, bare.json())


async def test_a_post_to_a_trailing_slash_is_answered_and_not_redirected() -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.post("/v1/chat/completions/", json=CHAT)
        assert reply.json()["choices"][0]["message"]["content"] == "a b c"
        ided = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "job/7/"})
        assert (await http.get(f"/v1/decisions/{ided.headers['x-request-id']}")).status_code == 200


# ── request ids ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "path", "keys", "status"),
    [
        ("GET", "/nothing", {}, 404),
        ("DELETE", "/v1/models", {}, 405),
        ("GET", "/v1/models", {"k": 0}, 401),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/v2/models/other", {}, 404),
    ],
)
async def test_every_reply_carries_a_request_id(method: str, path: str, keys: dict, status: int) -> None:
    async with client_of(gateway_deps(api_keys=keys)) as http:
        fresh, given = await http.request(method, path), await http.request(method, path, headers={"x-request-id": "a"})
        odd = await http.request(method, path, headers={"x-request-id": "no id, this"})
    assert fresh.status_code == given.status_code == status
    assert len(fresh.headers["x-request-id"]) == 32
    assert given.headers["x-request-id"] == "a"
    assert odd.headers["x-request-id"].replace("-", "").isalnum(), "what is no id is not repeated"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: ", 408),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000, 431),
        (b"GET /" + b"a" * 70_000, 414),
    ],
)
async def test_refusals_of_the_parser_carry_one_too(request_: bytes, status: int) -> None:
    async with gateway(header_timeout_s=0.3) as port:
        reply = await raw(port, request_)
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nx-request-id: " in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("piece", [1 << 20, 1000], ids=["at once", "bit by bit"])
@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (b"GET /" + b"a" * 80_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414, "uri_too_long"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414, "uri_too_long"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 80_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: a\r\n" * 20_000 + b"\r\n", 431, "headers_too_large"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 36\r\n"
            + b"".join(b"x-%d: a\r\n" % n for n in range(3000))
            + b'\r\n{"model": "tiny", "prompt": "say a"}',
            431,
            "headers_too_large",
        ),
    ],
)
async def test_what_is_too_large_is_named(request_: bytes, status: int, code: str, piece: int) -> None:
    async with gateway() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(request_), piece):
                writer.write(request_[at : at + piece])
                await writer.drain()
                await asyncio.sleep(0)
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert reply.startswith(b"HTTP/1.1 %d " % status), reply[:80]
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == code


async def test_a_long_query_below_the_bound_is_read() -> None:
    async with gateway() as port:
        reply = await raw(
            port, b"GET /v1/models?a=%s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % (b"b" * 8000)
        )
    assert reply.startswith(b"HTTP/1.1 200 ")


# ── HTTP/1.0, and upgrades that are none ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keep", ["", "connection: keep-alive\r\n"])
async def test_http_1_0_gets_no_chunks_and_the_end_of_its_stream_is_the_end_of_the_connection(keep: str) -> None:
    async with gateway() as port:
        stream = await raw(port, post("/v1/chat/completions", {**CHAT, "stream": True}, "1.0", keep))
        whole = await raw(port, post("/v1/chat/completions", CHAT, "1.0", keep))
    head, _, body = stream.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"content-length" in whole.partition(b"\r\n\r\n")[0]


@pytest.mark.process
async def test_curl_reads_a_stream_over_http_1_0() -> None:
    async with gateway() as port:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--http1.0", f"http://127.0.0.1:{port}/v1/chat/completions"),
            *("-H", "content-type: application/json", "-d", json.dumps({**CHAT, "stream": True})),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(curl.communicate(), 20)
    assert curl.returncode == 0
    assert out.endswith(b"data: [DONE]\n\n")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs a JDK")
async def test_javas_http_client_is_answered_as_it_comes() -> None:
    """It sends `Upgrade: h2c` and `HTTP2-Settings` with its first request, GET or POST."""
    async with gateway() as port:
        java = await asyncio.create_subprocess_exec(
            *("java", "-Xshare:auto", str(UPGRADE_CLIENT), f"http://localhost:{port}", json.dumps(CHAT)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(java.communicate(), 120)
    assert java.returncode == 0, errors.decode()
    assert out.decode().splitlines() == ["200 HTTP_1_1", "200 HTTP_1_1 a b c", "200 HTTP_1_1 [DONE]"]


# ── what a reply is written in ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("accepts", "packed"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("GZIP", True),
        ("*", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000, *;q=1", False),
        ("", False),
    ],
)
async def test_big_replies_are_packed_where_asked(accepts: str, packed: bool) -> None:
    async with gateway() as port:
        reply = await raw(port, post("/v1/chat/completions", LONG, lines=f"accept-encoding: {accepts}\r\n"))
        short = await raw(port, post("/v1/chat/completions", CHAT, lines=f"accept-encoding: {accepts}\r\n"))
    head, _, body = reply.partition(b"\r\n\r\n")
    assert (b"\r\ncontent-encoding: gzip" in head) == packed
    assert b"\r\nvary: accept-encoding" in head
    text = json.loads(gzip.decompress(body) if packed else body)["choices"][0]["message"]["content"]
    assert text.count("word") == 2000
    assert b"content-encoding" not in short


async def test_streams_are_never_packed() -> None:
    async with gateway() as port:
        reply = await raw(
            port, post("/v1/chat/completions", {**LONG, "stream": True}, lines="accept-encoding: gzip\r\n")
        )
    assert b"content-encoding" not in reply
    assert b"data: [DONE]" in reply


async def test_metrics_come_as_open_metrics_where_asked() -> None:
    async with client_of(gateway_deps()) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        opened = await http.get("/metrics", headers={"accept": asked})
        plain = await http.get("/metrics", headers={"accept": "*/*"})
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert opened.text.endswith("# EOF\n")
    counted = {f.name: f for f in text_string_to_metric_families(opened.text)}["overspill_gateway_responses"]
    assert {s.labels["route"]: s.value for s in counted.samples if s.name.endswith("_total")}["chat"] == 1
    assert plain.headers["content-type"].startswith("text/plain")
    assert {f.name for f in plain_families(plain.text)} >= {"overspill_gateway_responses"}
