"""One request on bare ASGI: what goes wrong before its handler is reached."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NoReturn

import pytest
from starlette.types import Message, Receive

from router.gateway.bodies import BodyRoom
from router.gateway.endpoint import Endpoint, RequestContext
from router.gateway.errors import Reply
from router.gateway.metrics import GatewayMetrics
from tests.support.gateway_fakes import gateway_deps


async def test_a_disk_that_fails_under_a_body_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    deps = gateway_deps()
    gate = SimpleNamespace(deps=deps, metrics=GatewayMetrics(deps.telemetry.registry), room=BodyRoom(deps.limits))
    sent: list[Message] = []

    async def handler(context: RequestContext) -> Reply:
        raise AssertionError("it is not reached")

    async def read(receive: Receive, context: RequestContext) -> NoReturn:
        raise OSError(28, "No space left on device")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    endpoint = Endpoint("files", handler, gate, read=read)  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [(b"x-request-id", b"r-1")]}
    with caplog.at_level(logging.ERROR):
        await endpoint(scope, receive, send)
    assert sent[0]["status"] == 500
    assert (b"x-request-id", b"r-1") in sent[0]["headers"]
    assert b"internal error" in sent[1]["body"]
    assert b"No space" not in sent[1]["body"]
