"""A small HTTP server that answers as servers of other makers do, page by page, and as none should."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

Page = Any
"""Bytes, text, a JSON value, an HTTP status, or a coroutine function from a request to a response."""

VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 70.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",kv_note="a \\"b\\" {c}",\
num_cpu_blocks="None",num_gpu_blocks="364"} 1.0
"""
LLAMA_METRICS = """\
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 5
llamacpp:n_tokens_max 0
"""
SGLANG_METRICS = """\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 7.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 1000.0
"""
TGI_METRICS = """\
# TYPE tgi_queue_size gauge
tgi_queue_size 4
tgi_batch_current_size 9
tgi_batch_current_max_tokens 1024
"""


class ForeignServer:
    """Use as `async with`. `pages` may change while it runs; a path that is not among them is not found.

    Attributes:
        bodies: of the requests for answers, decoded.
        asked: the paths asked for, in order.
        words: of every answer; pace_s: between two of them; gate: where set, an answer waits for it after two words.
        open: answers that are being sent.
    """

    def __init__(self, owner: str = "vllm", models: tuple[str, ...] = ("m",), **card: Any) -> None:
        cards = [{"id": name, "object": "model", "owned_by": owner, **card} for name in models]
        self.pages: dict[str, Page] = {"/v1/models": {"object": "list", "data": cards}, "/health": {"status": "ok"}}
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.words = ["one", " two", " three", " four"]
        self.gate: asyncio.Event | None = None
        self.open = 0
        self.url = ""
        self.key = ""

    async def __aenter__(self) -> ForeignServer:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def listen(self) -> None:
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[-1][1]}"

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}" and request.path != "/health":
            return web.json_response({"error": "no"}, status=401)
        page = self.pages.get(request.path, self.answer if request.path.endswith("completions") else 404)
        if callable(page):
            return await page(request)
        if isinstance(page, int):
            return web.Response(status=page)
        if isinstance(page, (bytes, str)):
            return web.Response(body=page)
        return web.json_response(page)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion as this kind of server does."""
        body = json.loads(await request.read())
        self.bodies.append(body)
        chat = "messages" in body
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        self.open += 1
        try:
            for index, word in enumerate(self.words[: body.get("max_tokens") or 99]):
                if index == 2 and self.gate is not None:
                    await self.gate.wait()
                choice = {"index": 0, **({"delta": {"content": word}} if chat else {"text": word})}
                await self._send(reply, {"choices": [choice]})
            await self._send(reply, {"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 40, "completion_tokens": len(self.words)}
            await self._send(reply, {"choices": [], "usage": usage})
            await reply.write(b"data: [DONE]\n\n")
        finally:
            self.open -= 1
        return reply

    @staticmethod
    async def _send(reply: web.StreamResponse, event: dict[str, Any]) -> None:
        await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def status(code: int, body: bytes = b"", **headers: str) -> Callable[[web.Request], Any]:
    """A page that answers with a status and headers."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(status=code, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return page


async def endless(request: web.Request) -> web.StreamResponse:
    """A page that never ends."""
    reply = web.StreamResponse()
    await reply.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await reply.write(b'{"data":[' + b" " * 65536)
    return reply
