"""Nobody reads, overwrites or outranks another caller; and a tier without keys hears nobody but its own host."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.record import DecisionLog, DecisionRecord
from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.listener import Listener, bind
from router.values.request import Objective
from router.values.settings import RouterSettings
from router.wire.names import PRIORITY
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, client_of, gateway_deps

CHAT = "/v1/chat/completions"
BODY = {"model": FAMILY, "messages": [{"role": "user", "content": "say hi"}]}
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["say hi"]}]}


# ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_decision_is_told_to_the_key_that_asked_and_to_no_other() -> None:
    async with client_of(gateway_deps(api_keys={"a": 0, "b": 0})) as http:
        alice, bob = ({"authorization": f"Bearer {key}", "x-request-id": "r1"} for key in "ab")
        await http.post(CHAT, json=BODY, headers=alice)
        assert (await http.get("/v1/decisions/r1", headers=alice)).status_code == 200
        stolen = await http.get("/v1/decisions/r1", headers=bob)
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (404, "request_id")


async def test_a_request_carries_a_digest_of_its_key_and_never_the_key() -> None:
    dispatcher = FakeDispatcher()
    deps = gateway_deps(dispatcher, api_keys={"top-secret": 0})
    async with client_of(deps, "top-secret") as http:
        await http.post(CHAT, json=BODY)
        await http.post(f"/v2/models/{FAMILY}/infer", json=INFER)
    assert {len(request.caller) for request in dispatcher.requests} == {64}
    assert "top-secret" not in repr(dispatcher.requests) + repr(deps)


def record(request_id: str, caller: str) -> DecisionRecord:
    return DecisionRecord(request_id, f"of {caller}", Objective(), 1, None, 0.0, "p", caller)


def test_a_repeated_id_overwrites_the_callers_own_record_only() -> None:
    log = DecisionLog(10)
    for caller in ("a", "b", "b"):
        log.add(record("r1", caller))
    assert (log.get("r1", "a").model, log.get("r1", "b").model, log.get("r1", "c"), log.get("r1")) == (
        "of a",
        "of b",
        None,
        None,
    )
    assert len(log) == 2


def test_a_caller_with_many_requests_pushes_out_its_own_records() -> None:
    log = DecisionLog(10)
    log.add(record("mine", "a"))
    for number in range(100):
        log.add(record(f"r{number}", "b"))
    assert log.get("mine", "a") is not None
    assert len(log) == 10
    log.capacity = 0
    log.trim()
    assert len(log) == 0


async def test_the_dispatcher_keeps_records_by_caller() -> None:
    async with Dispatcher([], RouterSettings()) as dispatcher:
        assert dispatcher.decision("r1", "a") is None


# ── priority ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ceiling", "asked", "given"),
    [(0, "5", 0), (0, "-3", -3), (0, None, 0), (3, "5", 3), (3, "3", 3), (-1, None, -1), (-1, "-1", -1)],
)
@pytest.mark.parametrize("place", ["header", "body"])
async def test_a_claimed_priority_is_lowered_to_the_callers_ceiling_and_the_reply_says_so(
    ceiling: int, asked: str | None, given: int, place: str
) -> None:
    dispatcher = FakeDispatcher()
    body: dict[str, Any] = dict(BODY)
    headers: dict[str, str] = {}
    if asked is not None:
        body, headers = (body, {PRIORITY: asked}) if place == "header" else ({**body, "priority": int(asked)}, {})
    lowered = (int(asked or 0)) != given
    for deps, key in (
        (gateway_deps(dispatcher, max_priority=ceiling), ""),
        (gateway_deps(dispatcher, api_keys={"k": ceiling}, max_priority=99), "k"),
    ):
        async with client_of(deps, key) as http:
            for stream in (False, True):
                reply = await http.post(CHAT, json={**body, "stream": stream}, headers=headers)
                assert reply.headers.get(PRIORITY) == (str(given) if lowered else None)
            metrics = (await http.get("/metrics")).text
        assert f"overspill_gateway_priorities_lowered_total {2.0 * lowered}" in metrics
    assert {request.objective.priority for request in dispatcher.requests} == {given}


async def test_who_is_refused_hears_at_which_priority() -> None:
    async with client_of(gateway_deps()) as http:
        refused = {**BODY, "messages": [{"role": "user", "content": "refuse shed"}]}
        reply = await http.post(CHAT, json=refused, headers={PRIORITY: "2147483647"})
        infer = await http.post(f"/v2/models/{FAMILY}/infer", json=INFER, headers={PRIORITY: "9"})
    assert (reply.status_code, reply.headers[PRIORITY], infer.headers[PRIORITY]) == (429, "0", "0")


# ── web pages, DNS rebinding, proxies ───────────────────────────────────────────────────────────────────────────────

OURS = ["localhost", "LOCALHOST:8600", "127.0.0.1", "127.0.0.1:8600", "127.8.8.8:1", "[::1]:8600", "app.localhost:8600"]
OTHERS = [
    "evil.example",
    "evil.example:8600",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "0.0.0.0:8600",
    "10.0.0.5",
    "[::2]:8600",
    "localhost@evil.example",
    "evil.example#localhost",
    "evil.example?localhost",
    "localhost:8600:1",
    "127.1",
    "2130706433",
    "localhost,evil.example",
    "[::1",
    "::1",
    "http://localhost",
    "localhost/",
]


@pytest.mark.parametrize("host", OURS)
async def test_without_keys_requests_to_this_host_are_answered(host: str) -> None:
    async with client_of(gateway_deps()) as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", [*OTHERS, "", " "])
async def test_without_keys_a_name_that_was_bound_to_loopback_is_not_answered(host: str) -> None:
    dispatcher = FakeDispatcher()
    async with client_of(gateway_deps(dispatcher)) as http:
        for reply in (
            await http.get("/v1/models", headers={"host": host}),
            await http.post(CHAT, json=BODY, headers={"host": host, "origin": f"http://{host}"}),
            await http.get("/v2", headers={"host": host}),
        ):
            assert reply.status_code == 421
            assert "localhost" in reply.text
    assert not dispatcher.requests


async def test_two_hosts_are_no_host() -> None:
    async with client_of(gateway_deps()) as http:
        twice = [("host", "localhost"), ("host", "evil.example")]
        assert (await http.get("/v1/models", headers=twice)).status_code == 421


async def test_with_keys_any_host_is_answered() -> None:
    async with client_of(gateway_deps(api_keys={"k": 0}), "k") as http:
        for host in ("cloud.example", "evil.example", "10.0.0.5:8700"):
            assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("x-forwarded-host", "localhost", 200),
        ("x-forwarded-host", "api.example", 421),
        ("x-forwarded-host", "localhost, api.example", 421),
        ("x-forwarded-host", "", 421),
        ("x-original-host", "api.example", 421),
        ("x-real-ip", "10.0.0.5", 421),
        ("x-real-ip", "127.0.0.1", 200),
        ("x-real-ip", "::1", 200),
        ("forwarded", "for=127.0.0.1;host=localhost;proto=http", 200),
        ("forwarded", "for=127.0.0.1;host=api.example", 421),
        ("forwarded", 'for="[2001:db8::1]:47"', 421),
        ("forwarded", "for=127.0.0.1, for=10.0.0.5", 421),
    ],
)
async def test_without_keys_nobody_comes_in_through_a_proxy_of_this_host(name: str, value: str, status: int) -> None:
    async with client_of(gateway_deps()) as http:
        assert (await http.get("/v1/models", headers={name: value})).status_code == status


@pytest.mark.parametrize("headers", [{"x-forwarded-proto": "https"}, {"via": "1.1 gateway.example"}])
async def test_without_keys_a_proxy_that_does_not_say_for_whom_is_not_answered(headers: dict) -> None:
    """As Envoy asks by itself: whoever it asks for looks like a caller on this host."""
    async with client_of(gateway_deps()) as http:
        reply = await http.get("/v1/models", headers=headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (401, next(iter(headers)))
        named = {**headers, "x-forwarded-for": "127.0.0.1"}
        assert (await http.get("/v1/models", headers=named)).status_code == 200
    async with client_of(gateway_deps(api_keys={"k": 0}), "k") as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:3000"}, True),
        ({"sec-fetch-site": "cross-site", "origin": "null"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, False),
    ],
)
async def test_without_keys_a_page_of_another_site_is_told_by_its_browser(headers: dict, allowed: bool) -> None:
    async with client_of(gateway_deps()) as http:
        for reply in (
            await http.get("/v1/models", headers=headers),
            await http.post(CHAT, json=BODY, headers={**headers, "content-type": "text/plain"}),
        ):
            assert (reply.status_code in {200, 415}) is allowed


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_what_a_form_may_send_is_no_inference(kind: str) -> None:
    async with client_of(gateway_deps()) as http:
        for path, body in ((CHAT, BODY), (f"/v2/models/{FAMILY}/infer", INFER)):
            reply = await http.post(path, json=body, headers={"content-type": kind})
            assert reply.status_code == 415


@pytest.mark.parametrize(
    ("names", "status"), [("10.0.0.5", 401), ("127.0.0.1", 200), ("127.0.0.1, 10.0.0.5", 401), ("10.0.0.5, ::1", 401)]
)
async def test_a_proxy_on_this_host_names_the_caller_to_the_tiers_own_server(names: str, status: int) -> None:
    with bind("127.0.0.1", 0, "gateway") as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1/models"
        async with Listener(create_app(gateway_deps()), ConnectionLimits()).running(bound), httpx.AsyncClient() as http:
            assert (await http.get(url)).status_code == 200
            assert (await http.get(url, headers={"x-forwarded-for": names})).status_code == status
