"""What is put right before anybody asks who is calling: trailing slashes, and the rules of browsers."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.gateway.auth import PAGE_ALLOWED
from router.gateway.errors import send_reply
from router.gateway.http.cors import Origins
from router.wire import headers as wire_headers

_EXACT = "/v1/decisions/"  # what follows is an id, which may end in a slash


class Front:
    """The outermost ASGI application of a tier."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path[-1:] == "/" and not path.startswith(_EXACT):
                scope["path"] = path.rstrip("/") or "/"
            for name, origin in scope["headers"]:
                if name == b"origin":
                    await self._answer_page(scope, receive, send, origin.decode("latin-1"))
                    return
        await self._app(scope, receive, send)

    async def _answer_page(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        """Answer what a web page sends: its browser asks first, and then needs to be told that the page may read."""
        if scope["method"] == "OPTIONS":
            headers = wire_headers.lower_case(scope["headers"])
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
