"""A server with a voice, ears and eyes, made by hand: no such model is there, and whether clients work is asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

VOICE = "voice"
VIEWER = "viewer"
CONFIGURED = """\
[[backends]]
name = "studio"
urls = ["{url}"]
server = "plain"
warm_up = false

[[backends.models]]
served = "voice"
tasks = ["speak", "transcribe", "translate"]

[[backends.models]]
served = "viewer"
modalities = ["text", "image", "audio"]
context_tokens = 4096
"""
"""Of a tier before it."""


@asynccontextmanager
async def studio() -> AsyncIterator[str]:
    """Run it on a free port of this machine; returns its URL."""
    application = web.Application()
    application.add_routes(
        [
            web.get("/v1/models", _models),
            web.post("/v1/audio/speech", _speak),
            web.post("/v1/audio/transcriptions", _hear),
            web.post("/v1/audio/translations", _hear),
            web.post("/v1/chat/completions", _look),
        ]
    )
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _models(_: web.Request) -> web.Response:
    cards = [{"id": name, "object": "model", "owned_by": "studio"} for name in (VOICE, VIEWER)]
    return web.json_response({"object": "list", "data": cards})


async def _speak(request: web.Request) -> web.StreamResponse:
    """Return as many pieces of sound as there are words, each of a kilobyte."""
    told = json.loads(await request.read())
    reply = web.StreamResponse(headers={"content-type": "audio/mpeg"})
    await reply.prepare(request)
    for word in told["input"].split():
        await reply.write(word.encode().ljust(1024, b"."))
    return reply


async def _hear(request: web.Request) -> web.Response:
    """Tell how many bytes were heard."""
    form = await request.post()
    sound = form["file"]
    if not isinstance(sound, web.FileField):
        return web.json_response({"error": {"message": "`file` is no file"}}, status=400)
    text = f"{len(sound.file.read())} bytes of {sound.filename}"
    if form.get("response_format") == "text":
        return web.Response(text=text)
    heard = {"text_tokens": 0, "audio_tokens": 9}
    usage = {"type": "tokens", "input_tokens": 9, "input_token_details": heard, "output_tokens": 3, "total_tokens": 12}
    return web.json_response({"text": text, "usage": usage})


async def _look(request: web.Request) -> web.StreamResponse:
    """Tell which kinds of parts the last message has."""
    content = json.loads(await request.read())["messages"][-1]["content"]
    kinds = ["text"] if isinstance(content, str) else [part["type"] for part in content]
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": f"{kind} "}}]} for kind in kinds]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage = {"prompt_tokens": 100 * len(kinds), "completion_tokens": len(kinds)}
    events.append({"choices": [], "usage": usage})
    for event in events:
        await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await reply.write(b"data: [DONE]\n\n")
    return reply
