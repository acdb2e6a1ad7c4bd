"""Pydantic AI: agents with plain and structured answers and one tool."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from checking import Checks, Pieces, Server
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

checks = Checks(("pydantic-ai-slim", "openai"))


class Person(pydantic.BaseModel):
    """A person."""

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def provider(server: Server) -> OpenAIProvider:
    return OpenAIProvider(base_url=server.openai_url, api_key=server.key)


def model(server: Server) -> OpenAIChatModel:
    return OpenAIChatModel(server.model, provider=provider(server))


SHORT: Any = {"max_tokens": 24, "temperature": 0}
LONGER: Any = {"max_tokens": 90, "temperature": 0}


@checks.that("plain")
async def plain(server: Server) -> None:
    result = await Agent(model(server), model_settings=SHORT).run("Say hello.")
    assert result.output
    assert result.usage.output_tokens > 0


@checks.that("streamed")
async def streamed(server: Server) -> None:
    pieces = Pieces()
    async with Agent(model(server), model_settings=SHORT).run_stream("Tell a story of the sea.") as result:
        async for text in result.stream_text(delta=True, debounce_by=None):
            pieces.add(text)
    pieces.came_over_time()


@checks.that("structured: NativeOutput, by json_schema")
async def native(server: Server) -> None:
    agent = Agent(model(server), output_type=NativeOutput(Person, strict=True), model_settings=LONGER, retries=0)
    assert isinstance((await agent.run("Invent a person.")).output, Person)


@checks.that("structured: ToolOutput, the default, by a required tool")
async def by_tool(server: Server) -> None:
    agent = Agent(model(server), output_type=ToolOutput(Person, strict=True), model_settings=LONGER, retries=0)
    assert isinstance((await agent.run("Invent a person.")).output, Person)


class ToolFirst(AbstractCapability[None]):
    """The first step must call a tool and the next must not: how Pydantic AI lets a choice vary by step."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required" if context.run_step <= 1 else "none"}


@checks.that("agent with one tool: called with what fits its schema, answered, and a plain end")
async def one_tool(server: Server) -> None:
    asked: list[str] = []
    agent = Agent(model(server), model_settings=LONGER, capabilities=[ToolFirst()], retries=0)

    @agent.tool_plain(strict=True)
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Tell the weather in a city."""
        asked.append(city)
        return f"It is clear in {city}."

    result = await agent.run("What is the weather in Paris?")
    assert asked
    assert set(asked) <= {"Paris", "Rome"}
    assert result.output


@checks.that("the responses model")
async def responses(server: Server) -> None:
    asked = OpenAIResponsesModel(server.model, provider=provider(server))
    result = await Agent(asked, model_settings=SHORT).run("Say hello.")
    assert result.output


checks.run()
