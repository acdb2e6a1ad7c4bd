"""OpenAI's Agents SDK: one tool, over chat completions and over responses."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checking import Checks, Pieces, Server
from openai import AsyncOpenAI

checks = Checks(("openai-agents", "openai"))
set_tracing_disabled(disabled=True)


class Person(pydantic.BaseModel):
    """A person."""

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def chat_model(server: Server) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(server.model, sdk(server))


def responses_model(server: Server) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(server.model, sdk(server))


def sdk(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.openai_url, api_key=server.key, max_retries=0, timeout=80)


async def with_one_tool(model: Any) -> None:
    """Run an agent that must call its tool first, and answers with what came back."""
    called: list[str] = []

    @function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Tell the weather in a city."""
        called.append(city)
        return f"It is clear in {city}."

    agent = Agent(
        "forecaster",
        instructions="You tell the weather.",
        model=model,
        tools=[get_weather],
        model_settings=ModelSettings(tool_choice="get_weather", max_tokens=60, temperature=0),
        tool_use_behavior="run_llm_again",
    )
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=4)
    assert called
    assert set(called) <= {"Paris", "Rome"}
    assert result.final_output
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds


async def structured(model: Any) -> None:
    agent = Agent(
        "inventor", model=model, output_type=Person, model_settings=ModelSettings(max_tokens=80, temperature=0)
    )
    assert isinstance((await Runner.run(agent, "Invent a person.")).final_output, Person)


async def streamed(model: Any) -> None:
    pieces = Pieces()
    # An answer that its limit cuts ends in `response.incomplete`, which the SDK raises: ask for a short one.
    agent = Agent("greeter", model=model, model_settings=ModelSettings(max_tokens=200, temperature=0))
    result = Runner.run_streamed(agent, "Say hello.")
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.add(event.data.delta)
    pieces.came_over_time()
    assert result.final_output == pieces.text


@checks.that("chat completions: an agent with one tool")
async def chat_tool(server: Server) -> None:
    await with_one_tool(chat_model(server))


@checks.that("chat completions: structured output")
async def chat_structured(server: Server) -> None:
    await structured(chat_model(server))


@checks.that("chat completions: streamed")
async def chat_streamed(server: Server) -> None:
    await streamed(chat_model(server))


@checks.that("responses: an agent with one tool")
async def responses_tool(server: Server) -> None:
    await with_one_tool(responses_model(server))


@checks.that("responses: structured output")
async def responses_structured(server: Server) -> None:
    await structured(responses_model(server))


@checks.that("responses: streamed")
async def responses_streamed(server: Server) -> None:
    await streamed(responses_model(server))


checks.run()
