"""How a running answer becomes bytes on the connection: pieces, headers and ends, on bare ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import msgspec
import pytest
from prometheus_client import generate_latest

from router.gateway.app import GatewayLimits, create_app
from router.values.answer import Answer
from router.values.chunk import FinishReason, TokenChunk
from router.values.request import InferenceRequest
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, gateway_deps

BODY = {"model": FAMILY, "messages": [{"role": "user", "content": "say a"}], "stream": True}


class Connection:
    """One request, as a server hands it to an application; what was sent is in `sent`."""

    def __init__(self, body: dict, *, reads: bool = True) -> None:
        self.body = json.dumps(body).encode()
        self.sent: list[dict] = []
        self.left = asyncio.Event()
        self.reads = reads
        self._asked = False

    async def receive(self) -> dict:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.left.set()  # as uvicorn does
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def run(self, app) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 4000),
            "server": ("127.0.0.1", 8600),
        }
        await app(scope, self.receive, self.send)

    @property
    def pieces(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


class Scripted(FakeDispatcher):
    """Answers with given chunks; `ready_until` of them are there at once."""

    closing_s = 0.0

    def script(self, chunks: list[TokenChunk], ready_until: int = 0, **route) -> None:
        self.chunks, self.ready_until, self.route, self.given, self.closed_streams = chunks, ready_until, route, 0, 0

    async def start(self, request: InferenceRequest) -> Answer:
        answer = await super().start(request)
        return Answer(
            msgspec.structs.replace(answer.route, **self.route), self._scripted(), lambda: self.given < self.ready_until
        )

    async def _scripted(self) -> AsyncGenerator[TokenChunk, None]:
        try:
            for chunk in self.chunks:
                self.given += 1
                yield chunk
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(self.closing_s)
            self.closed_streams += 1


WORDS = [TokenChunk(f" {index}") for index in range(10)]
END = TokenChunk("", 0, finish_reason=FinishReason.STOP)


async def test_what_is_ready_at_once_goes_out_in_one_piece_and_the_first_text_alone() -> None:
    dispatcher, connection = Scripted(), Connection(BODY)
    dispatcher.script([*WORDS, END], ready_until=8)
    await asyncio.wait_for(connection.run(create_app(gateway_deps(dispatcher))), 60)
    counts = [piece.count(b'"content":" ') for piece in connection.pieces]
    assert counts == [1, 7, 1, 1, 0]
    assert connection.pieces[-1].endswith(b"data: [DONE]\n\n")
    assert [message.get("more_body", False) for message in connection.sent[1:]] == [True] * 4 + [False]
    assert dispatcher.closed_streams == 1


async def test_an_exchange_costs_one_task_beside_the_servers_own() -> None:
    made = 0

    def count_tasks(loop, coroutine, **options) -> asyncio.Task:
        nonlocal made
        made += 1
        return asyncio.Task(coroutine, loop=loop, **options)

    dispatcher, connection = Scripted(), Connection(BODY)
    dispatcher.script([*WORDS, END])
    app = create_app(gateway_deps(dispatcher))
    asyncio.get_running_loop().set_task_factory(count_tasks)
    try:
        await connection.run(app)
    finally:
        asyncio.get_running_loop().set_task_factory(None)
    assert made == 1


async def test_a_client_that_leaves_or_stops_reading_ends_the_work() -> None:
    for reads in (True, False):
        dispatcher, connection = Scripted(), Connection(BODY, reads=reads)
        dispatcher.script(WORDS)
        deps = gateway_deps(dispatcher, limits=GatewayLimits(send_stall_s=0.05))
        exchange = asyncio.ensure_future(connection.run(create_app(deps)))
        if reads:
            await asyncio.sleep(0.01)
            connection.left.set()
        await asyncio.wait_for(exchange, 60)
        assert dispatcher.closed_streams == 1


async def test_a_reply_that_is_whole_was_not_left_by_its_client() -> None:
    dispatcher, connection = Scripted(), Connection(BODY)
    dispatcher.script([*WORDS, END])
    dispatcher.closing_s = 0.05
    deps = gateway_deps(dispatcher)
    await asyncio.wait_for(connection.run(create_app(deps)), 60)
    assert dispatcher.closed_streams == 1
    assert b"overspill_gateway_disconnects_total 0.0" in generate_latest(deps.telemetry.registry)


async def test_a_server_that_cancels_its_request_is_obeyed() -> None:
    dispatcher, connection = Scripted(), Connection(BODY)
    dispatcher.script(WORDS)
    exchange = asyncio.ensure_future(connection.run(create_app(gateway_deps(dispatcher))))
    await asyncio.sleep(0.01)
    exchange.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(exchange, 60)
    assert dispatcher.closed_streams == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_name_that_no_header_can_hold_is_no_internal_error(stream: bool) -> None:
    """Crack 6: an upstream's variant outside Latin-1 turned every reply into a 500."""
    dispatcher, connection = Scripted(), Connection({**BODY, "stream": stream})
    dispatcher.script([*WORDS, END], variant="模型")
    await asyncio.wait_for(connection.run(create_app(gateway_deps(dispatcher))), 60)
    assert connection.sent[0]["status"] == 200
    assert b"9" in b"".join(connection.pieces)
