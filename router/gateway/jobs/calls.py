"""Requests of jobs, put to the tier's own API: they take the way of every request, but for the network and the key."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Scope

from router.base.errors import Unauthenticated
from router.gateway.auth import CALLER
from router.gateway.endpoint import IN_SLACK
from router.jobs.call import Call, Told
from router.tenants.directory import Directory
from router.tenants.tenant import Caller
from router.wire.names import REPLY_NAMES, REQUEST_ID
from router.wire.openai.errors import encode_error

_STRANGER_S = 60.0  # until it is looked whether its key is back
_ALONE = b'"replicas_failed"'


class Calls:
    """`router.jobs.call.Ask` over the routes of a gateway, behind its authentication.

    Args:
        routes: of the tier, without any middleware.
        directory: whose keys open the tier: nothing is done for who has none any more.
    """

    def __init__(self, routes: ASGIApp, directory: Directory) -> None:
        self._routes = routes
        self._directory = directory

    async def __call__(self, call: Call) -> Told:
        caller = self._directory.by_tenant(call.owner)
        if caller is None:
            return Told(401, encode_error(_stranger()), retry_after_s=_STRANGER_S)
        exchange = _Exchange(call.body)
        await self._routes(_scope(call, caller), exchange.receive, exchange.send)
        return exchange.told()


def _stranger() -> Unauthenticated:
    return Unauthenticated("whoever made this job has no key here any more", param="authorization")


def _scope(call: Call, caller: Caller) -> Scope:
    lines = [*call.headers, (REQUEST_ID, call.request_id), ("content-type", "application/json")]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in lines],
        "client": None,
        "server": None,
        CALLER: caller,
        IN_SLACK: call.in_slack,
    }


class _Exchange:
    """The two ends of one request: its body is there, and its client never leaves; cancel the call instead."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._pieces: list[bytes] = []
        self._status = 500
        self._headers: dict[str, str] = {}

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self._pieces.append(message.get("body", b""))

    def told(self) -> Told:
        body = b"".join(self._pieces)
        ours = tuple((name, self._headers[name]) for name in REPLY_NAMES if name in self._headers)
        return Told(self._status, body, self._retry_after_s(body), ours)

    def _retry_after_s(self, body: bytes) -> float | None:
        """When to come back; not where it is the request itself that every replica fails on."""
        text = self._headers.get("retry-after-ms")
        if text is None or self._headers.get("x-should-retry") == "false" or _ALONE in body:
            return None
        return int(text) / 1000
