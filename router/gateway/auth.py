"""Who may come in: bearer keys, or, where none are set, callers on this host only."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from router.base.errors import Unauthenticated
from router.base.loopback import is_loopback
from router.gateway.errors import Reply, dialect_of, render_error
from router.wire import headers as wire_headers

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})
"""Probes carry no credentials; these pages tell nothing but health and load."""


class Authentication:
    """ASGI middleware in front of everything a tier serves."""

    def __init__(self, app: ASGIApp, api_keys: frozenset[str]) -> None:
        self._app = app
        # Digests: all of one length, so that the comparison tells nothing about a key, not even how long it is.
        self._digests = tuple(_digest(key.encode()) for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"} or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
        else:
            await _send(render_error(refusal, dialect_of(scope["path"])), scope, send)

    def _refusal(self, scope: Scope) -> Unauthenticated | None:
        if not self._digests:
            return _refusal_without_keys(scope)
        given = wire_headers.lower_case(scope["headers"]).get("authorization", "")
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return Unauthenticated("an API key is required: send `authorization: Bearer <key>`", param="authorization")
        digest = _digest(key.strip().encode("latin-1"))  # the bytes as they were sent
        # Every key is compared, whichever matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if any(matches):
            return None
        return Unauthenticated("this API key is not known here", param="authorization")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal_without_keys(scope: Scope) -> Unauthenticated | None:
    if not _on_this_host(scope):
        return Unauthenticated("this tier has no API keys and therefore answers callers on its own host only")
    origin = wire_headers.lower_case(scope["headers"]).get("origin")
    if origin is not None and not _is_local_page(origin):
        # Any web page may send requests to loopback through the browser of somebody who visits it.
        return Unauthenticated(
            "this tier has no API keys and therefore does not answer web pages of other hosts", param="origin"
        )
    return None


def _is_local_page(origin: str) -> bool:
    try:
        return is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False


def _on_this_host(scope: Scope) -> bool:
    """Whether the peer is on loopback, or has no address at all: it came through a Unix socket, or in this process."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:  # a name, or what a proxy has put there: it may be anybody
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


async def _send(reply: Reply, scope: Scope, send: Send) -> None:
    given = wire_headers.lower_case(scope["headers"]).get(wire_headers.REQUEST_ID)
    lines = [("content-type", reply.media_type), ("content-length", str(len(reply.body))), *reply.headers]
    if given:
        lines.append((wire_headers.REQUEST_ID, wire_headers.header_safe(given[:128])))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in lines]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    await send({"type": "http.response.body", "body": reply.body})
