"""Models that think before they answer: their thoughts go down every tier, and how long they may think goes up."""

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
from tests.support.foreign_server import ForeignServer, Page
from tests.support.passed_chain import passing
from tests.support.tiers import Tier

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
MODEL = BackendModel(served="m")
THOUGHT = ["Let", " me", " see."]
USAGE = {"prompt_tokens": 40, "completion_tokens": 6, "completion_tokens_details": {"reasoning_tokens": 3}}


@contextlib.asynccontextmanager
async def world(field: str, bodies: list[dict[str, Any]], owner: str = "vllm") -> AsyncIterator[list[Tier]]:
    """Run an edge over a cloud over a server that thinks, and tells its thoughts in a `field` of its own."""

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(json.loads(await request.read()))
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({field: word} for word in THOUGHT)]
        deltas += [{"content": "It", field: None}, {"content": " is."}]
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": USAGE}]
        for event in events:
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async with ForeignServer(owner) as server:
        server.pages["/v1/chat/completions"] = answer
        entry = BackendSettings(
            name="b", urls=(server.url,), poll_interval_s=0.05, warm_up=False, models=(BackendModel(served="m"),)
        )
        async with passing(entry) as tiers:
            yield list(tiers)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_thoughts_are_told_apart_from_the_answer(field: str) -> None:
    async with world(field, []) as tiers:
        for tier in tiers:
            client = openai.AsyncOpenAI(base_url=f"{tier.url}/v1", api_key="none", max_retries=0)
            reply = await client.chat.completions.create(**ASK)
            message = reply.choices[0].message.model_dump()
            assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
                "It is.",
                "Let me see.",
                "Let me see.",
            )
            assert reply.usage is not None
            assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (6, "stop")
            assert reply.usage.completion_tokens_details is not None
            assert reply.usage.completion_tokens_details.reasoning_tokens == 3
            stream = await client.chat.completions.create(**ASK, stream=True)
            deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
            assert [delta["reasoning_content"] for delta in deltas if delta.get("reasoning_content")] == THOUGHT
            assert [delta["content"] for delta in deltas if delta["content"]] == ["It", " is."]
            response = await client.responses.create(model="m", input="Hi", stream=True)
            events = [event async for event in response]
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == "It is."
            thought: Any = [event for event in events if event.type == "response.reasoning_text.delta"]
            assert [event.delta for event in thought] == THOUGHT
            assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
            usage = events[-1].response.usage
            assert usage is not None
            assert usage.output_tokens_details.reasoning_tokens == 3
            await client.close()


@pytest.mark.parametrize("odd", [7, [], {"text": "x"}, True])
async def test_thoughts_that_are_no_text_are_none(odd: Any) -> None:
    async with world("reasoning", []) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        THOUGHT.append(odd)
        try:
            reply = (await http.post("/v1/chat/completions", json=ASK)).json()
        finally:
            THOUGHT.pop()
    assert reply["choices"][0]["message"]["content"] == "It is."
    assert reply["choices"][0]["message"]["reasoning"] == "Let me see."


@pytest.mark.parametrize("owner", ["vllm", "sglang", "somebody"])
async def test_how_long_it_may_think_is_passed_on(owner: str) -> None:
    bodies: list[dict[str, Any]] = []
    async with world("reasoning", bodies, owner) as (edge, _), httpx.AsyncClient(base_url=edge.url) as http:
        assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
        assert (await http.post("/v1/chat/completions", json={**ASK, "reasoning_effort": "low"})).status_code == 200
        asked = {"model": "m", "input": "Hi", "reasoning": {"effort": "high"}}
        told = (await http.post("/v1/responses", json=asked)).json()
        assert told["reasoning"]["effort"] == "high"
        wrong = await http.post("/v1/chat/completions", json={**ASK, "reasoning_effort": 3})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_effort")
        assert [body.get("reasoning_effort") for body in bodies[-3:]] == [None, "low", "high"]
        summed = await http.post("/v1/responses", json={**asked, "reasoning": {"summary": "auto"}})
    thought, said = summed.json()["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert said["content"][0]["text"] == "It is."


async def test_a_server_that_breaks_while_it_thinks_is_followed_by_another() -> None:
    broken: list[ForeignServer] = []

    def first_breaks(server: ForeignServer) -> Page:
        async def page(request: web.Request) -> web.StreamResponse:
            if broken:
                return await server.answer(request)
            broken.append(server)
            reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await reply.prepare(request)
            event = {"choices": [{"index": 0, "delta": {"reasoning": "Hm"}}]}
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            assert request.transport is not None
            request.transport.abort()
            return reply

        return page

    async with ForeignServer("vllm") as one, ForeignServer("vllm") as two:
        for server in (one, two):
            server.pages["/v1/chat/completions"] = first_breaks(server)
        backends = [
            BackendSettings(name=name, urls=(server.url,), poll_interval_s=0.05, warm_up=False, models=(MODEL,))
            for name, server in (("a", one), ("b", two))
        ]
        async with passing(*backends) as (_, cloud), httpx.AsyncClient(base_url=cloud.url) as http:
            reply = (await http.post("/v1/chat/completions", json=ASK)).json()
            assert reply["choices"][0]["message"]["content"] == "one two three four", reply
    assert len(broken) == 1
