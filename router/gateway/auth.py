"""Who may come in: bearer keys, or, where none are set, callers on this host only, and no web page of another host."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from router.base.errors import OverspillError, Unauthenticated
from router.base.loopback import is_local_page, is_loopback
from router.gateway.errors import Misdirected, send_error
from router.tenants.settings import CERTIFICATE_HEADERS
from router.tenants.tenancy import Tenancy
from router.tenants.tenant import Caller
from router.wire import headers as wire_headers
from router.wire import names as wire_names

OPEN_PATHS = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"),
        *("/docs", "/openapi.json"),
    }
)
"""Probes need no credentials; these pages tell them nothing but health and what every copy can be asked."""
CALLER = "overspill.caller"
"""Of a scope: the `Caller` who was let in; absent on a page that is open to all."""
PAGE_ALLOWED = "overspill.page_allowed"
"""Of a scope: an operator lets pages of the origin that it names read answers (`router.gateway.http.cors`)."""
_HEADERS = "overspill.headers"
"""Of a scope: its headers as `headers_of` has read them."""
CERTIFICATE = "overspill.certificate"
"""Of a scope: the digest of the client certificate that this tier's own TLS has verified; absent without one."""
ADMITTED = "overspill.admitted"
"""Of a scope of `router.gateway.listener`: called when a request was let in; its connection has proved itself then."""

_API_KEY = "x-api-key"
"""What Anthropic's clients send their key in; the same keys, by the same rules."""
_SAYS_WHO = frozenset({"authorization", _API_KEY, wire_names.INSTANCE, *CERTIFICATE_HEADERS})
"""Headers that tell who sends a probe."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_FORWARDED = re.compile(r'(?:^|[;,])\s*(?:host|for)\s*=\s*(?:"([^"]*)"|([^;,\s]*))', re.IGNORECASE)
_MAX_ADDRESS_CHARS = 64  # with the zone of its interface; what is longer is none, and is not kept
# Names that a proxy on this host was called by: what it passes on without `x-forwarded-for` looks like this host's own.
_PROXIED = ("x-forwarded-host", "x-original-host", "x-real-ip")
_CAME_BY_PROXY = ("via", "x-forwarded-proto")
_NAMES_CALLER = frozenset({"x-forwarded-for", "forwarded", "x-real-ip"})


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request as `wire.headers.lower_case` reads them, which is done once."""
    headers: dict[str, str] | None = scope.get(_HEADERS)
    if headers is None:
        headers = scope[_HEADERS] = wire_headers.lower_case(scope["headers"])
    return headers


class Authentication:
    """ASGI middleware in front of everything a tier serves.

    Args:
        tenancy: whose keys open the tier.
    """

    def __init__(self, app: ASGIApp, tenancy: Tenancy) -> None:
        self._app = app
        self._tenancy = tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        if scope["path"] in OPEN_PATHS:
            if not _SAYS_WHO.isdisjoint(headers):  # load and credits are told to those let in
                with contextlib.suppress(OverspillError):
                    scope[CALLER] = self._caller(scope, headers)
            await self._app(scope, receive, send)
            return
        try:
            scope[CALLER] = self._caller(scope, headers)
        except OverspillError as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": refusal.message[:100]})
            else:
                await send_error(refusal, scope["path"], headers, send)
            return
        if ADMITTED in scope:
            scope[ADMITTED]()
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope, headers: Mapping[str, str]) -> Caller:
        """Return who sent the request.

        Raises:
            Unauthenticated: no key, or none that is known; without keys: not from this host.
            Misdirected: without keys, and meant for another host.
        """
        if self._tenancy.directory.open:
            _require_this_host(scope, headers)
            return self._tenancy.directory.nobody
        client = scope.get("client")
        peer = None if client is None else client[0]
        return identify(self._tenancy, headers, peer, certificate=scope.get(CERTIFICATE))


def identify(
    tenancy: Tenancy, headers: Mapping[str, str], peer: str | None, *, certificate: str | None = None
) -> Caller:
    """Return whom the credentials of a request let in, over whatever protocol it came, where keys are needed.

    A key goes before a certificate: devices of one proxy may still be told apart by their tokens.

    Args:
        headers: lower-case names; over gRPC, the metadata.
        peer: the address that the connection came from; None through a Unix socket.
        certificate: the digest of the one that the connection itself has shown.

    Raises:
        Unauthenticated: there are none, none that is known, or two.
    """
    key, param = _key_in(headers)
    if key:
        found = tenancy.directory.by_key(key.encode("latin-1", "replace"))  # the bytes as they were sent
        if found is None:
            raise Unauthenticated("this API key is not known here", param=param)
        return found
    found = tenancy.by_certificate(headers, peer)
    if found is None and certificate is not None:
        found = tenancy.directory.by_certificate(certificate)
    if found is None:
        raise Unauthenticated(
            "an API key is required: send `authorization: Bearer <key>` or `x-api-key: <key>`", param="authorization"
        )
    return found


def _key_in(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the key of a request, empty without one, and the header that holds it.

    Raises:
        Unauthenticated: there are two: whose request it is would be a guess.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    bearer, other = bearer.strip() if scheme.lower() == "bearer" else "", headers.get(_API_KEY, "")
    if bearer and other and bearer != other:
        raise Unauthenticated(
            f"`authorization` and `{_API_KEY}` hold two different API keys: send one of them", param=_API_KEY
        )
    return (bearer, "authorization") if bearer else (other, _API_KEY)


def _require_this_host(scope: Scope, headers: Mapping[str, str]) -> None:
    """Let in what comes from this host and was meant for it.

    Any web page may send requests to loopback through the browser of somebody who visits it; and the owner of a name
    may let that point to 127.0.0.1, so that its page reads the answers too.
    """
    if not _on_this_host(scope):
        raise Unauthenticated("this tier has no API keys and therefore answers callers on its own host only")
    if scope.get("client") is None:
        return  # through a Unix socket, or in this process: no browser does that
    proxied = next((name for name in _CAME_BY_PROXY if name in headers), None)
    if proxied is not None and _NAMES_CALLER.isdisjoint(headers):
        raise Unauthenticated(
            f"`{proxied}`: a proxy does not say for whom it asks, and this tier has no API keys: set keys, or have the "
            "proxy send `x-forwarded-for`",
            param=proxied,
        )
    for name, host in _hosts(headers):
        if not _names_this_host(host):
            raise Misdirected(
                f"`{name}: {wire_names.header_safe(host[:80])}`: this tier has no API keys and therefore answers "
                "requests to localhost, 127.0.0.1 or [::1] only; use one of these, or set API keys",
                param=name,
            )
    if scope.get(PAGE_ALLOWED, False):
        return
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site", "")
    if (origin is None and site.lower() == "cross-site") or (origin is not None and not is_local_page(origin)):
        raise Unauthenticated(
            "this tier has no API keys and therefore does not answer web pages of other hosts",
            param="sec-fetch-site" if origin is None else "origin",
        )


def _hosts(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return every host that the request names as its own: a repeated header is joined, and names none."""
    found = [("host", headers.get("host", ""))]
    for name in _PROXIED:
        if name in headers:
            found += [(name, _bracketed(host.strip())) for host in headers[name].split(",")]
    if "forwarded" in headers:
        for quoted, plain in _FORWARDED.findall(headers["forwarded"]):
            found.append(("forwarded", _bracketed(quoted or plain)))
    return found


def _bracketed(address: str) -> str:
    """Write an address of version 6 as `host` has it."""
    return f"[{address}]" if address.count(":") > 1 and not address.startswith("[") else address


def _names_this_host(host: str) -> bool:
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name = found[1].removesuffix(".")
    return is_loopback(name) or name.endswith(".localhost")


def _on_this_host(scope: Scope) -> bool:
    """Whether the peer is on loopback, or has no address at all: it came through a Unix socket, or in this process."""
    client = scope.get("client")
    return client is None or (len(client[0]) <= _MAX_ADDRESS_CHARS and _is_address_of_this_host(client[0]))


@lru_cache(maxsize=256)
def _is_address_of_this_host(peer: str) -> bool:
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:  # a name, or what a proxy has put there: it may be anybody
        return False
    return is_loopback(str(address))
