"""What is put right before anybody asks who is calling: proxies, trailing slashes, and the rules of browsers."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.gateway.auth import PAGE_ALLOWED, headers_of
from router.gateway.client import CONNECTION
from router.gateway.errors import send_reply
from router.gateway.http.cors import Origins

_EXACT = "/v1/decisions/"  # what follows is an id, which may end in a slash
_FORWARDED = frozenset({"x-forwarded-for", "x-forwarded-proto"})
_PROXIES = ["127.0.0.1", "::1"]
"""A proxy on this host may name the caller, so that "loopback only" also holds behind it."""


class Front:
    """The outermost ASGI application of a tier."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins
        self._name_caller = ProxyHeadersMiddleware(_nothing, _PROXIES)  # type: ignore[arg-type]  # as in Starlette

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = headers_of(scope)
            if CONNECTION in scope and not _FORWARDED.isdisjoint(headers):  # another server reads them itself
                await self._name_caller(scope, receive, send)  # type: ignore[arg-type]  # as in Starlette
            path: str = scope["path"]
            if path[-1:] == "/" and not path.startswith(_EXACT):
                scope["path"] = path.rstrip("/") or "/"
            origin = headers.get("origin")
            if origin is not None:
                await self._answer_page(scope, receive, send, origin)
                return
        await self._app(scope, receive, send)

    async def _answer_page(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        """Answer what a web page sends: its browser asks first, and then needs to be told that the page may read."""
        if scope["method"] == "OPTIONS":
            headers = headers_of(scope)
            if "access-control-request-method" in headers:
                await send_reply(self._origins.preflight(scope["path"], headers), headers, send)
                return
        if not self._origins.allow(origin):
            await self._app(scope, receive, send)
            return
        scope[PAGE_ALLOWED] = True
        told = [(name.encode(), value.encode("latin-1")) for name, value in self._origins.told(origin)]

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *told]
            await send(message)

        await self._app(scope, receive, telling)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands behind uvicorn's middleware, which changes the scope: what follows is `Front`'s."""
