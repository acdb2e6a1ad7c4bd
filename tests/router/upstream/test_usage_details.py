"""What a server tells of its tokens beyond their counts: passed down every tier, and never believed blindly."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from router.upstream.settings import BackendModel, BackendSettings
from tests.support.foreign_server import ForeignServer
from tests.support.passed_chain import passing
from tests.support.tiers import Tier

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 4,
    "total_tokens": 44,
    "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 24, "audio_tokens": None},
    "completion_tokens_details": {"reasoning_tokens": 3, "brand_new_tokens": 1, "accepted_prediction_tokens": 0},
}
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@contextlib.asynccontextmanager
async def world(usage: Any) -> AsyncIterator[list[Tier]]:
    """Run an edge over a cloud over a server that tells `usage` with the end of each answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        chat = "messages" in json.loads(await request.read())
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for word in ("one", " two"):
            piece = {"delta": {"content": word}} if chat else {"text": word}
            await reply.write(b"data: " + json.dumps({"choices": [{"index": 0, **piece}]}).encode() + b"\n\n")
        end: dict[str, Any] = {"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}
        for event in ({"choices": [end]}, {"choices": [], "usage": usage}):
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async with ForeignServer("vllm") as server:
        server.pages |= {"/v1/chat/completions": answer, "/v1/completions": answer}
        entry = BackendSettings(name="b", urls=(server.url,), poll_interval_s=0.05, models=(BackendModel(served="m"),))
        async with passing(entry) as tiers:
            yield list(tiers)


def told(usage: Any) -> dict[str, Any]:
    return {
        "prompt": usage.prompt_tokens_details.model_dump(exclude_none=True),
        "completion": usage.completion_tokens_details.model_dump(exclude_none=True),
    }


async def test_details_reach_the_caller_over_every_tier_in_every_api() -> None:
    expected = {
        "prompt": {"cached_tokens": 16, "cache_write_tokens": 24},
        "completion": {"reasoning_tokens": 3, "brand_new_tokens": 1, "accepted_prediction_tokens": 0},
    }
    async with world(USAGE) as tiers:
        for tier in tiers:
            client = openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0)
            assert told((await client.chat.completions.create(**ASK)).usage) == expected
            assert told((await client.completions.create(model="m", prompt="Hi")).usage) == expected
            for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
                stream = await client.chat.completions.create(**ASK, stream=True, stream_options=options)  # type: ignore[call-overload]
                usages = [chunk.usage async for chunk in stream]
                assert told(usages[-1]) == expected
                assert ("continuous_usage_stats" in options) == (usages[1] is not None)
            response = (await client.responses.create(model="m", input="Hi")).usage
            assert response is not None
            assert response.input_tokens_details.model_dump(exclude_none=True) == expected["prompt"]
            assert response.output_tokens_details.model_dump() == expected["completion"]
            await client.close()


async def test_choices_share_what_is_told_of_their_prompt() -> None:
    async with world(USAGE) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        usage = (await http.post("/v1/chat/completions", json={**ASK, "n": 2})).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16, "cache_write_tokens": 24}
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 6


@pytest.mark.parametrize(
    "odd",
    [7, "many", [], {"reasoning_tokens": -1}, {"reasoning_tokens": 1.5}, {"reasoning_tokens": True}, {"a": 1}, {}],
)
async def test_what_cannot_be_true_is_left_out_and_breaks_nothing(odd: Any) -> None:
    usage = {**USAGE, "prompt_tokens_details": odd, "completion_tokens_details": odd}
    async with world(usage) as tiers:
        for tier in tiers:
            async with httpx.AsyncClient(base_url=tier.url) as http:
                reply = await http.post("/v1/chat/completions", json=ASK)
                assert reply.json()["usage"] == {"prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44}
                response = (await http.post("/v1/responses", json={"model": "m", "input": "Hi"})).json()["usage"]
                assert response["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
                assert response["output_tokens_details"] == {"reasoning_tokens": 0}
