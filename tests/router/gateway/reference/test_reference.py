"""/openapi.json and /docs: made from the types that decode, readable without the internet."""

from __future__ import annotations

import re

import httpx
import pytest

from router.gateway.app import create_app
from tests.support.gateway_fakes import client_of, gateway_deps


@pytest.fixture
async def http():
    async with client_of(gateway_deps(api_keys={"k": 0}, scale=lambda model: {})) as client:
        yield client


async def test_every_route_is_described(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    routes = create_app(gateway_deps(scale=lambda model: {})).api.router.routes
    served = {(re.sub(r":path}", "}", route.path), m.lower()) for route in routes for m in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert {(path, method) for path, found in described["paths"].items() for method in found} == served


async def test_bodies_are_those_that_are_decoded(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v2/models/{model}/infer"):
        asked = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        shape = described["components"]["schemas"][asked["$ref"].rpartition("/")[2]]
        assert shape["required"]
    chat = described["components"]["schemas"]["Chat"]
    assert chat["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    names = [p["name"] for p in described["paths"]["/v1/chat/completions"]["post"]["parameters"]]
    assert "x-overspill-deadline-ms" in names
    assert {"200", "400", "401", "429", "503"} <= set(described["paths"]["/v1/chat/completions"]["post"]["responses"])
    assert "_" not in {name[0] for name in described["components"]["schemas"]}


async def test_anthropics_api_is_told_with_its_errors_and_its_key(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        told = described["paths"][path]["post"]
        assert told["tags"] == ["Anthropic"]
        assert {"x-api-key": []} in told["security"]
        errors = {name: reply for name, reply in told["responses"].items() if name != "200"}
        assert "529" in errors
        assert "503" not in errors
        for reply in errors.values():
            assert reply["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicError")
    assert described["components"]["securitySchemes"]["x-api-key"]["in"] == "header"
    assert "<h2>Anthropic</h2>" in (await http.get("/docs")).text


async def test_all_references_resolve(http: httpx.AsyncClient) -> None:
    reply = await http.get("/openapi.json")
    known = {f"#/components/schemas/{name}" for name in reply.json()["components"]["schemas"]}
    assert set(re.findall(r'"(#/components/schemas/[^"]+)"', reply.text)) <= known


async def test_the_page_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.text), "a device may have no internet"
    assert "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for text in ("/v1/chat/completions", "x-overspill-deadline-ms", "temperature"):
        assert text in page.text
