"""Health, metrics, decisions and who may see them."""

from __future__ import annotations

from typing import NoReturn

import httpx
import pytest
from starlette.routing import Route
from starlette.types import Message

from router.gateway.app import create_app
from router.gateway.auth import Authentication
from router.values.replica import ReplicaSnapshot
from router.wire.load import decode_orca
from tests.support.gateway_fakes import (
    FAMILY,
    FakeDispatcher,
    client_of,
    gateway_deps,
    replica_info,
    tenancy_of,
)

CHAT = "/v1/chat/completions"


def chat(text: str = "say hi") -> dict:
    return {"model": FAMILY, "messages": [{"role": "user", "content": text}]}


async def _nothing_comes() -> NoReturn:
    raise AssertionError("nobody reads a request that is refused for its head")


async def test_health_carries_the_load() -> None:
    async with client_of(gateway_deps(kv_usage=lambda: 0.5)) as http:
        assert (await http.get("/health/live")).json() == {"status": "live"}
        ready = await http.get("/health/ready")
    assert ready.status_code == 200
    report = decode_orca(ready.headers["endpoint-load-metrics"])
    assert (report.running, report.queued, report.slots, report.kv_usage) == (2, 0, 8, 0.5)
    assert [load.variant for load in report.variants] == ["tiny-fp32", "tiny-int8"]


@pytest.mark.parametrize("path", ["/health/ready", "/v2/health/ready"])
async def test_not_ready_says_why_and_when_to_come_back(path: str) -> None:
    async with client_of(gateway_deps(closed=lambda: "starting: loading tiny")) as http:
        reply = await http.get(path)
        assert (await http.get("/health/live")).status_code == 200
    assert (reply.status_code, reply.headers["retry-after"], reply.headers["retry-after-ms"]) == (503, "1", "1000")
    assert "loading tiny" in reply.text
    assert ("endpoint-load-metrics" in reply.headers) == (path == "/health/ready")


async def test_what_no_replica_could_answer_is_told_to_probes_and_taken_all_the_same() -> None:
    away = [ReplicaSnapshot(replica_info(), available=False, slots=0, why="restarting", back_in_s=4.5)]
    dispatcher = FakeDispatcher(snapshots=away)
    async with client_of(gateway_deps(dispatcher)) as http:
        for path in ("/health/ready", "/health", "/ping", "/v2/health/ready"):
            reply = await http.get(path)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "5"), path
            assert "restarting" in reply.text
        status = (await http.get("/v1/status")).json()
        assert (status["ready"], status["why"]) == (False, "restarting")
        assert (await http.post(CHAT, json=chat())).status_code == 200  # for a cache, a job, or its own refusal
    assert len(dispatcher.requests) == 1


async def test_metrics_count_what_happened() -> None:
    async with client_of(gateway_deps()) as http:
        await http.post(CHAT, json=chat())
        await http.post(CHAT, json=chat("refuse shed"))
        await http.post(CHAT, json={**chat("break"), "stream": True})
        lines = (await http.get("/metrics")).text.splitlines()
    for line in (
        'overspill_gateway_responses_total{route="chat",status="200"} 2.0',
        'overspill_gateway_responses_total{route="chat",status="429"} 1.0',
        'overspill_gateway_stream_errors_total{code="replica_broken"} 1.0',
        "overspill_gateway_requests_in_flight 0.0",
    ):
        assert line in lines


async def test_decisions_are_shown_by_request_id() -> None:
    async with client_of(gateway_deps()) as http:
        made = await http.post(CHAT, json=chat())
        shown = await http.get(f"/v1/decisions/{made.headers['x-request-id']}")
        missing = await http.get("/v1/decisions/none")
    assert shown.json()["request_id"] == made.headers["x-request-id"]
    assert (shown.json()["model"], shown.json()["outcome"]) == (FAMILY, "running")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "request_id")


async def test_ids_with_slashes_have_decisions_too() -> None:
    async with client_of(gateway_deps()) as http:
        await http.post(CHAT, json=chat(), headers={"x-request-id": "job/7"})
        assert (await http.get("/v1/decisions/job/7")).status_code == 200


async def test_keys_are_asked_for_everywhere_but_at_the_probes() -> None:
    deps = gateway_deps(api_keys={"k1": 0, "schlüssel": 0})
    async with client_of(deps) as http:
        for path in ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/status", "/v1/decisions/x", "/v2", "/nothing", "/v2/models/tiny"):
            reply = await http.get(path)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert "error" in reply.json()
        for value in (b"Bearer wrong", b"Bearer ", b"Bearer", b"k1", b"Basic k1", b"Bearer k1x", b"Bearer \xff"):
            reply = await http.get("/v1/models", headers=[(b"authorization", value)])
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for value in (b"Bearer k1", b"bearer k1", "Bearer schlüssel".encode()):
            assert (await http.get("/v1/models", headers=[(b"authorization", value)])).status_code == 200
        assert (await http.get("/v1/models", headers={"x-request-id": "r7"})).headers["x-request-id"] == "r7"


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.5", False),
        ("::ffff:10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("unknown", False),
        ("", False),
    ],
)
async def test_without_keys_only_this_host_is_let_in(address: str, allowed: bool) -> None:
    async with client_of(gateway_deps(), address=address) as http:
        assert (await http.get("/v1/models")).status_code == (200 if allowed else 401)
        assert (await http.get("/health/ready")).status_code == 200


@pytest.mark.parametrize(("client", "allowed"), [(None, True), (("", 0), False), (("10.0.0.5", 5), False)])
async def test_a_peer_without_any_address_is_in_this_process_or_on_its_socket(client, allowed) -> None:
    let_in, sent = [], []

    async def page(scope, receive, send) -> None:
        let_in.append(scope)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models", "headers": [], "client": client}
    await Authentication(page, tenancy_of())(scope, _nothing_comes, send)
    assert (bool(let_in), [m["status"] for m in sent[:1]]) == (allowed, [] if allowed else [401])


async def test_websockets_are_guarded_too() -> None:
    sent = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def page(scope, receive, send) -> None:
        raise AssertionError("let in")

    guard = Authentication(page, tenancy_of({"k": 0}))
    await guard({"type": "websocket", "path": "/live", "headers": []}, _nothing_comes, send)
    assert sent[0]["type"] == "websocket.close"


async def test_what_no_endpoint_has_caught_fails_in_the_same_shape() -> None:
    async def broken(scope, receive, send) -> None:
        raise ZeroDivisionError("a bug")

    app = create_app(gateway_deps())
    app.api.router.routes.append(Route("/broken", broken))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.get("/broken")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in reply.text


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("http://[::1]:8", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("null", False),
        ("http://[", False),
    ],
)
async def test_without_keys_no_foreign_web_page_is_let_in(origin: str, allowed: bool) -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.post(CHAT, json=chat(), headers={"origin": origin})
    assert reply.status_code == (200 if allowed else 401)


async def test_a_wrong_path_or_method_says_what_there_is() -> None:
    async with client_of(gateway_deps()) as http:
        lost, wrong = await http.get("/v3/chat"), await http.get(CHAT)
    assert "/v1 and /v2" in lost.json()["error"]["message"]
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "takes POST" in wrong.json()["error"]["message"]


async def test_head_has_no_body() -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.head("/health/ready")
    assert (reply.status_code, reply.content) == (200, b"")


async def test_load_goes_with_replies_that_ask_for_it() -> None:
    async with client_of(gateway_deps(FakeDispatcher())) as http:
        plain = await http.post(CHAT, json=chat())
        asked = await http.post(CHAT, json=chat(), headers={"endpoint-load-metrics-format": "JSON"})
    assert "endpoint-load-metrics" not in plain.headers
    assert decode_orca(asked.headers["endpoint-load-metrics"]).running == 2
