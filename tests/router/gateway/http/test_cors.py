"""Pages of other origins: what a browser asks before it lets them read an answer, and what it is told."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ConfigError
from router.gateway.app import create_app
from router.gateway.http.cors import Origins
from router.gateway.http.settings import CorsSettings
from tests.support.gateway_fakes import FAMILY, client_of, gateway_deps

CHAT = {"model": FAMILY, "messages": [{"role": "user", "content": "say hi"}]}
APP = "https://app.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-lang"}


def configured(**settings) -> dict:
    return {"cors": CorsSettings(**settings)}


async def preflight(http: httpx.AsyncClient, origin: str, **more: str) -> httpx.Response:
    return await http.options("/v1/chat/completions", headers={"origin": origin, **ASKS, **more})


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:1", "http://localhost"]
)
async def test_pages_of_this_host_may_read_a_tier_that_only_this_host_reaches(origin: str) -> None:
    async with client_of(gateway_deps()) as http:
        asked = await preflight(http, origin)
        reply = await http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin})
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == origin
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    assert int(asked.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in asked.headers
    assert reply.json()["choices"][0]["message"]["content"] == "hi"
    assert reply.headers["access-control-allow-origin"] == origin
    assert reply.headers["access-control-expose-headers"] == "*"
    assert "origin" in reply.headers["vary"].lower()


async def test_beyond_loopback_it_is_off_until_it_is_configured() -> None:
    open_to_all = gateway_deps(api_keys={"k": 0}, local_pages=False)
    for origin in ("http://localhost:3000", APP):
        async with client_of(open_to_all, "k") as http:
            refused = await preflight(http, origin)
            reply = await http.get("/v1/models", headers={"origin": origin})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert "cors.allow_origins" in refused.json()["error"]["message"]
        assert reply.status_code == 200
        assert not [name for name in (*refused.headers, *reply.headers) if name.startswith("access-control")]
        open_to_all = gateway_deps(api_keys={"k": 0}, local_pages=False)


async def test_a_configured_page_may_read_also_where_no_keys_are_set_and_no_other() -> None:
    deps = gateway_deps(**configured(allow_origins=(APP,)))
    async with client_of(deps) as http:
        asked = await preflight(http, APP, **{"access-control-request-private-network": "true"})
        reply = await http.post(
            "/v1/chat/completions", json=CHAT, headers={"origin": APP, "sec-fetch-site": "cross-site"}
        )
        other = await http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://evil.example"})
    assert (asked.status_code, asked.headers["access-control-allow-private-network"]) == (204, "true")
    assert reply.status_code == 200
    assert other.status_code == 401
    assert "access-control-allow-origin" not in other.headers


async def test_who_names_two_pages_is_none_of_them() -> None:
    twice = [("origin", "http://localhost:3000"), ("origin", "https://evil.example")]
    async with client_of(gateway_deps()) as http:
        reply = await http.post("/v1/chat/completions", json=CHAT, headers=twice)
    assert reply.status_code == 401
    assert "access-control-allow-origin" not in reply.headers


async def test_errors_can_be_read_too() -> None:
    async with client_of(gateway_deps(api_keys={"k": 0}, **configured(allow_origins=(APP,)))) as http:
        for path in ("/v1/models", "/nothing"):
            reply = await http.get(path, headers={"origin": APP})
            assert reply.status_code == 401
            assert reply.headers["access-control-allow-origin"] == APP
        lost = await http.get("/nothing", headers={"origin": APP, "authorization": "Bearer k"})
    assert (lost.status_code, lost.headers["access-control-allow-origin"]) == (404, APP)


async def test_credentials_and_the_star_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="allow_credentials"):
        CorsSettings(allow_origins=("*",), allow_credentials=True)
    with pytest.raises(ConfigError, match="API keys"):
        create_app(gateway_deps(**configured(allow_origins=("*",))))
    async with client_of(gateway_deps(api_keys={"k": 0}, **configured(allow_origins=("*",))), "k") as http:
        assert (await preflight(http, APP)).headers["access-control-allow-origin"] == "*"
        assert (await http.get("/v1/models", headers={"origin": "null"})).headers["access-control-allow-origin"] == "*"
    with_cookies = configured(allow_origins=(APP,), allow_credentials=True)
    async with client_of(gateway_deps(api_keys={"k": 0}, **with_cookies), "k") as http:
        asked = await preflight(http, APP)
        reply = await http.get("/v1/models", headers={"origin": APP})
    assert (asked.headers["access-control-allow-origin"], asked.headers["access-control-allow-credentials"]) == (
        APP,
        "true",
    )
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert "x-request-id" in reply.headers["access-control-expose-headers"], (
        "with credentials a star is a header's name"
    )


@pytest.mark.parametrize(
    ("allowed", "origin", "found"),
    [
        ("https://*.example.com", "https://a.example.com", True),
        ("https://*.example.com", "https://a.b.example.com", True),
        ("https://*.example.com", "https://example.com", False),
        ("https://*.example.com", "https://evilexample.com", False),
        ("https://*.example.com", "http://a.example.com", False),
        ("https://*.example.com", "https://a.example.com:8443", False),
        ("https://app.example:8443", "https://app.example:8443", True),
        ("https://App.Example", "https://app.example", True),
        ("https://app.example", "https://app.example.evil.test", False),
        ("https://app.example", "null", False),
    ],
)
def test_which_origins_a_pattern_means(allowed: str, origin: str, found: bool) -> None:
    assert Origins(CorsSettings(allow_origins=(allowed,)), local_pages=False).allow(origin) == found


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/", "https://a/b", "null", "https://a.*.b", "", "ftp://x"]
)
def test_what_is_no_origin_is_refused_by_the_configuration(wrong: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match="origin"):
        msgspec.convert({"allow_origins": [wrong]}, CorsSettings)


@given(st.text(max_size=60))
def test_no_origin_is_allowed_that_was_not_named(origin: str) -> None:
    origins = Origins(CorsSettings(allow_origins=(APP, "https://*.example.com")), local_pages=False)
    if origins.allow(origin):
        assert origin.lower() == APP or origin.lower().endswith(".example.com")


async def test_what_a_page_asks_for_is_not_reflected_without_bounds() -> None:
    async with client_of(gateway_deps()) as http:
        for headers in ("x" * 5000, "a b;c", "a\x0bb"):
            asked = await preflight(http, "http://localhost", **{"access-control-request-headers": headers})
            assert asked.status_code == 204
            assert "access-control-allow-headers" not in asked.headers
