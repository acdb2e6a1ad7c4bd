"""AutoGen: its client of OpenAI's API, whole, streamed, under a schema and cancelled, and an agent with a tool."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import CreateResult, ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checking import Checks, Pieces, Server

checks = Checks(("autogen-agentchat", "autogen-ext", "openai"))
ASKED = [UserMessage(content="What is the weather in Paris?", source="user")]


class Report(pydantic.BaseModel):
    """What an answer is parsed into."""

    city: Literal["Paris", "Rome"]
    celsius: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"It is clear in {city}."


def client(server: Server, **options: object) -> OpenAIChatCompletionClient:
    knows = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    told = {"model": server.model, "base_url": server.openai_url, "api_key": server.key, "max_retries": 0}
    drawn = {"max_tokens": 80, "temperature": 0, "seed": 3}
    return OpenAIChatCompletionClient(**{**told, **drawn, **options}, model_info=ModelInfo(**knows, family="unknown"))


@checks.that("create, with its usage")
async def create(server: Server) -> None:
    reply = await client(server).create(ASKED)
    assert isinstance(reply.content, str)
    assert reply.content
    assert reply.usage.completion_tokens > 0


@checks.that("create_stream: pieces over time, usage at the end")
async def stream(server: Server) -> None:
    pieces, last = Pieces(), None
    async for last in client(server).create_stream(ASKED, include_usage=True):
        pieces.add(last if isinstance(last, str) else None)
    pieces.came_over_time()
    assert isinstance(last, CreateResult)
    assert last.usage.completion_tokens > 0


@checks.that("an answer under a Pydantic model")
async def structured(server: Server) -> None:
    reply = await client(server).create(ASKED, json_output=Report)
    assert Report.model_validate_json(str(reply.content))


@checks.that("tools: a required call that fits")
async def tools(server: Server) -> None:
    tool = FunctionTool(get_weather, description="The weather in a city.", strict=True)
    reply = await client(server, max_tokens=120).create(ASKED, tools=[tool], tool_choice=tool)
    assert not isinstance(reply.content, str)
    assert json.loads(reply.content[0].arguments)["city"] in {"Paris", "Rome"}


@checks.that("an agent with a tool reaches an end")
async def agent(server: Server) -> None:
    acting = AssistantAgent("acting", client(server), tools=[get_weather], reflect_on_tool_use=True)
    assert (await acting.run(task="What is the weather in Paris?")).messages[-1].to_text()


@checks.that("a cancelled answer, and the next request is served")
async def cancelled(server: Server) -> None:
    token = CancellationToken()
    running = asyncio.ensure_future(client(server, max_tokens=1000).create(ASKED, cancellation_token=token))
    await asyncio.sleep(0.2)
    token.cancel()
    try:
        await running
    except asyncio.CancelledError:
        assert (await client(server, max_tokens=4).create(ASKED)).content
        return
    raise AssertionError("it was answered all the same")


@checks.that("errors: an unknown model, a prompt beyond the window")
async def errors(server: Server) -> None:
    long = [UserMessage(content="word " * (server.context_tokens + 500), source="user")]
    for options, asked, kind in (
        ({"model": "gpt-none"}, ASKED, openai.NotFoundError),
        ({}, long, openai.BadRequestError),
    ):
        try:
            await client(server, **options).create(asked)
        except kind:
            continue
        raise AssertionError(f"served, where {kind.__name__} was due")


checks.run()
