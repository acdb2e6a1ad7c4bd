"""Routes → OpenAPI 3.1. Bodies are described by the very types that decode them: neither can forget the other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import orjson
from starlette.routing import BaseRoute, Route

from router.base.extras import installed
from router.gateway.auth import OPEN_PATHS
from router.gateway.endpoint import Endpoint
from router.wire import names as wire_names
from router.wire.anthropic.errors import OVERLOADED

_REF = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
# What each of our request headers asks for; those between tiers are nobody else's business.
_ASKS = {
    wire_names.DEADLINE: ("number", "milliseconds after which the answer is worth nothing"),
    wire_names.LATE_VALUE: ("number", "milliseconds after the deadline over which its value falls to nothing"),
    wire_names.TTFT: ("number", "milliseconds to the first token"),
    wire_names.TPOT: ("number", "milliseconds for each further token"),
    wire_names.PRIORITY: ("integer", "higher is better, negative may be shed first"),
    wire_names.LOCALITY: ("string", "any, local-only or cloud-only"),
    wire_names.MIN_QUALITY: ("number", "of the rung that answers, from 0 to 1"),
    wire_names.SHORTEN: ("string", "allow: an overloaded tier may cap the answer"),
    wire_names.DEFER: ("string", "allow: what cannot be served now is kept, and answered later (202)"),
    wire_names.SESSION: ("string", "requests of one session like to meet the same replica"),
    wire_names.CACHE_SALT: ("string", "requests with other salts share no KV cache"),
    wire_names.REQUEST_ID: ("string", "the caller's own id of the request"),
}
_FAILS = {
    "400": "the request must be changed; `error.param` names the field or header at fault",
    "401": "the API key is missing or unknown",
    "404": "no such model",
    "413": "the body is larger than this tier reads",
    "429": "a quota or queue is full; `retry-after-ms` says when to come back",
    "503": "no capacity; `retry-after-ms` says when to come back, `x-should-retry: false` that no retry can help",
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
_KSERVE_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "properties": {name: {"type": "string"} for name in ("type", "message", "code")}},
        "request_id": {"type": ["string", "null"]},
    },
}
_ANTHROPIC_FAILS = {
    "400": "the request must be changed; `error.message` names the field or header at fault",
    **{status: _FAILS[status] for status in ("401", "404", "413")},
    "429": "a limit of the caller's own is reached; `retry-after-ms` says when to come back",
    str(OVERLOADED): "no capacity; `retry-after-ms` says when to come back, `x-should-retry: false` that no retry can "
    "help",
}
_ERRORS = {"KServe V2": "KServeError", "Anthropic": "AnthropicError"}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe(routes: Iterable[BaseRoute], tier: str) -> dict[str, Any]:
    """Return the OpenAPI document of a tier: every route with an `Endpoint`, in its order."""
    served = [(route, route.app) for route in routes if isinstance(route, Route) and isinstance(route.app, Endpoint)]
    bodies = [endpoint.takes for _, endpoint in served if endpoint.takes is not None]
    shapes, components = _schemas(list(dict.fromkeys(bodies)))
    paths: dict[str, dict[str, Any]] = {}
    for route, endpoint in served:
        page = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            page[method.lower()] = _operation(route.path, method, endpoint, shapes)
    components |= {"Error": _ERROR, "KServeError": _KSERVE_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Overspill, {tier} tier",
            "version": installed("overspill") or "0",
            "description": "OpenAI's API, Anthropic's messages, KServe V2 (open inference protocol) and operations. "
            "Promises are asked for by request headers; reply headers tell who answered, and what was given up for it.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": _KEYS,
        },
    }


def _schemas(bodies: list[type]) -> tuple[dict[type, dict[str, Any]], dict[str, Any]]:
    """Return a schema for each body, and what they refer to; a private type shows its name without the underscore."""
    found, components = msgspec.json.schema_components(bodies, ref_template=_REF + "{name}")
    shown = orjson.loads(orjson.dumps([found, components]).replace(f'"{_REF}_'.encode(), f'"{_REF}'.encode()))
    named = {name.lstrip("_"): {**schema, "title": name.lstrip("_")} for name, schema in shown[1].items()}
    return dict(zip(bodies, shown[0], strict=True)), named


def _operation(path: str, method: str, endpoint: Endpoint, shapes: Mapping[type, dict[str, Any]]) -> dict[str, Any]:
    tag = _tag(path)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ]
    operation: dict[str, Any] = {"summary": endpoint.summary, "tags": [tag]}
    if path not in OPEN_PATHS:
        operation["security"] = [{name: []} for name in _KEYS]
    if endpoint.admits:
        parameters += [
            {"name": name, "in": "header", "schema": {"type": kind}, "description": what}
            for name, (kind, what) in _ASKS.items()
        ]
    if endpoint.takes is not None:
        content = {"application/json": {"schema": shapes[endpoint.takes]}}
        operation["requestBody"] = {"required": True, "content": content}
    error = {"application/json": {"schema": {"$ref": f"{_REF}{_ERRORS.get(tag, 'Error')}"}}}
    admitted = _ANTHROPIC_FAILS if tag == "Anthropic" else _FAILS
    fails = admitted if endpoint.admits else {"401": _FAILS["401"]} if path not in OPEN_PATHS else {}
    operation["responses"] = {"200": {"description": "answered"}}
    operation["responses"] |= {status: {"description": what, "content": error} for status, what in fails.items()}
    name = method.lower() + _PARAMETER.sub(r"by_\1", path)
    operation["operationId"] = re.sub(r"\W+", "_", name).strip("_")
    return {**operation, "parameters": parameters} if parameters else operation


def _tag(path: str) -> str:
    if path.startswith("/v2"):
        return "KServe V2"
    if path.startswith("/v1/messages"):
        return "Anthropic"
    operations = ("/v1/status", "/v1/scale", "/v1/decisions")
    return "OpenAI" if path.startswith("/v1/") and not path.startswith(operations) else "Operations"
