"""The engine behind every server of the comparison: it has each answer ready, and costs next to nothing.

    python -m benchmarks.gateway.stub PORT [--token-ms MS]

OpenAI's chat API on a bare asyncio protocol. To an Overspill agent it is a tier of Overspill: one rung, and a load
report that never changes. A streamed answer goes out token by token: all streams get their next one in the same turn
of the event loop, as those of one continuous batch do.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import lru_cache
from typing import cast

import orjson
import uvloop

from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.wire import load as wire_load
from router.wire.openai.models import encode_models, model_cards

MODEL = "smollm2-135m"
PROMPT_TOKENS = 40
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_USAGE = re.compile(rb'"include_usage"\s*:\s*true')
_RUNNING_USAGE = re.compile(rb'"continuous_usage_stats"\s*:\s*true')
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


def engine_info() -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"cloud/{MODEL}-stub",
        endpoint="local",
        tier="cloud",
        remote=False,
        family=MODEL,
        variant=f"{MODEL}-stub",
        rung=0,
        quality=1.0,
        context_tokens=8192,
        prior=SpeedPrior(100_000.0, 10_000.0, 0.0),
    )


class Engine:
    """What all connections share: the ready-made bytes, and the batch that is being decoded.

    Args:
        token_s: seconds from one token of a stream to the next; 0: one in every turn of the event loop.
    """

    def __init__(self, token_s: float) -> None:
        self.batch: set[Connection] = set()
        self._token_s = token_s
        self._ticking = False
        info = engine_info()
        load = wire_load.encode_orca(
            wire_load.summarise([ReplicaSnapshot(info, available=True, slots=1024)], kv_usage=None, waiting=0)
        )
        self._load = f"{wire_load.HEADER}: {load}\r\n".encode()
        self.models = encode_models(model_cards([info], 0))

    def reply(self, body: bytes, kind: bytes = b"application/json") -> bytes:
        return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n%s" % (
            kind,
            len(body),
            self._load,
            body,
        )

    def stream_head(self) -> bytes:
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
            b"cache-control: no-cache\r\nx-overspill-tier: cloud\r\nx-overspill-variant: %s-stub\r\n"
            b"x-overspill-rung: 0\r\n%s\r\n" % (MODEL.encode(), self._load)
        )

    def join(self, connection: Connection) -> None:
        self.batch.add(connection)
        if not self._ticking:
            self._ticking = True
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._token_s:
            loop.call_later(self._token_s, self._tick)
        else:
            loop.call_soon(self._tick)

    def _tick(self) -> None:
        for connection in list(self.batch):
            connection.step()
        self._ticking = bool(self.batch)
        if self._ticking:
            self._schedule()


def chunk(data: bytes) -> bytes:
    """Return an event as a chunk of an HTTP/1.1 body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def event(delta: dict[str, object], finish: str | None, used: dict[str, int] | None) -> bytes:
    fields: dict[str, object] = {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": f"{MODEL}-stub",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }
    if used is not None:
        fields["usage"] = used
    return b"data: " + orjson.dumps(fields) + b"\n\n"


@lru_cache
def pieces_of(tokens: int, *, told: bool, running: bool) -> tuple[bytes, ...]:
    """Return a streamed answer as the pieces that go out one by one, the chunked body's end included.

    Args:
        told: the usage comes in an event of its own.
        running: it comes with every event.
    """
    pieces = [chunk(event({"content": " word"}, None, usage(index) if running else None)) for index in range(1, tokens)]
    pieces.append(chunk(event({"content": " end"}, None, usage(tokens) if running else None)))
    pieces[0] = chunk(event({"role": "assistant", "content": ""}, None, usage(0) if running else None)) + pieces[0]
    last = chunk(event({}, "length", usage(tokens) if running else None))
    if told:
        fields = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 0, "model": f"{MODEL}-stub"}
        last += chunk(b"data: " + orjson.dumps({**fields, "choices": [], "usage": usage(tokens)}) + b"\n\n")
    pieces[-1] += last + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return tuple(pieces)


@lru_cache
def whole_of(tokens: int) -> bytes:
    text = " word" * (tokens - 1) + " end"
    message = {"role": "assistant", "content": text, "refusal": None}
    return orjson.dumps(
        {
            "id": "chatcmpl-stub",
            "object": "chat.completion",
            "created": 0,
            "model": f"{MODEL}-stub",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
            "usage": usage(tokens),
        }
    )


class Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._got = b""
        self._left: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - the protocol's own
        self._engine.batch.discard(self)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, rest = self._got.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if not found or len(rest) < size:
            return
        self._got = rest[size:]
        self._answer(head, rest[:size])

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /v1/models"):
            self._transport.write(self._engine.reply(self._engine.models))
        elif not head.startswith(b"POST /v1/chat/completions"):
            self._transport.write(self._engine.reply(b'{"status":"ready"}'))
        else:
            found = _MAX_TOKENS.search(body)
            tokens = int(found[1]) if found else 1
            if _STREAM.search(body):
                told, running = _USAGE.search(body) is not None, _RUNNING_USAGE.search(body) is not None
                self._begin(tokens, told=told, running=running)
            else:
                self._transport.write(self._engine.reply(whole_of(tokens)))

    def _begin(self, tokens: int, *, told: bool, running: bool) -> None:
        self._left = list(reversed(pieces_of(tokens, told=told, running=running)))
        self._transport.write(self._engine.stream_head() + self._left.pop())
        if self._left:
            self._engine.join(self)

    def step(self) -> None:
        """Send the next token."""
        self._transport.write(self._left.pop())
        if not self._left:
            self._engine.batch.discard(self)


async def serve(port: int, token_s: float) -> None:
    engine = Engine(token_s)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=512)
    await server.serve_forever()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--token-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.token_ms / 1e3))


if __name__ == "__main__":
    main()
