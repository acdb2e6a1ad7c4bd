"""uvicorn and Starlette with the stub's answer at hand: the floor for a server in Python.

python -m benchmarks.gateway.echo PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.gateway.stub import event, usage, whole_of


async def _chat(request: Request) -> Response:
    asked = orjson.loads(await request.body())
    if not asked["stream"]:
        return Response(whole_of(asked["max_tokens"]), media_type="application/json")
    return StreamingResponse(_events(asked["max_tokens"]), media_type="text/event-stream")


async def _events(tokens: int) -> AsyncIterator[bytes]:
    yield event({"role": "assistant", "content": ""}, None, None)
    for _ in range(1, tokens):
        yield event({"content": " word"}, None, None)
    yield event({"content": " end"}, None, None)
    yield event({}, "length", usage(tokens)) + b"data: [DONE]\n\n"


async def _health(request: Request) -> Response:  # noqa: ARG001 - the route's own
    return Response(b"ok")


app = Starlette(routes=[Route("/v1/chat/completions", _chat, methods=["POST"]), Route("/health", _health)])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, backlog=512)
