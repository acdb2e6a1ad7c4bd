"""A server of OpenAI's API without a model: it says the last message back, a word at a time, at a speed that is set.

    python -m benchmarks._stub_engine PORT [--ttft-ms 5] [--token-ms 2]

`/asked` tells how often each last message was answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter

from aiohttp import web

MODEL = "stub"


class Stub:
    """Answers chats."""

    def __init__(self, ttft_s: float, token_s: float) -> None:
        self._ttft_s = ttft_s
        self._token_s = token_s
        self._asked: Counter[str] = Counter()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", self._health)
        application.router.add_get("/asked", self._tell)
        application.router.add_post("/v1/chat/completions", self._chat)
        return application

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "owned_by": "stub", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _tell(self, _: web.Request) -> web.Response:
        return web.json_response(self._asked)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        text = body["messages"][-1]["content"]
        words = text.split()[: body.get("max_tokens") or 64] or ["nothing"]
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await asyncio.sleep(self._ttft_s)
        await reply.prepare(request)
        for index, word in enumerate(words):
            if index:
                await asyncio.sleep(self._token_s)
            delta = {"index": 0, "delta": {"content": f" {word}" if index else word}}
            await _send(reply, {"choices": [delta]})
        await _send(reply, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(words)}
        await _send(reply, {"choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}})
        await reply.write(b"data: [DONE]\n\n")
        self._asked[text] += 1
        return reply


async def _send(reply: web.StreamResponse, event: dict[str, object]) -> None:
    await reply.write(b"data: " + json.dumps({"model": MODEL, **event}).encode() + b"\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--ttft-ms", type=float, default=5.0)
    parser.add_argument("--token-ms", type=float, default=2.0)
    options = parser.parse_args()
    stub = Stub(options.ttft_ms / 1e3, options.token_ms / 1e3)
    web.run_app(stub.application(), host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
