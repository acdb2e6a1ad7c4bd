"""smolagents: the model alone, and agents whose every step is a call of a tool, or code under a schema."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from checking import Checks, Pieces, Server
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

checks = Checks(("smolagents", "openai"))
ASKED = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def model(server: Server) -> OpenAIModel:
    address = {"model_id": server.model, "api_base": server.openai_url, "api_key": server.key}
    return OpenAIModel(**address, max_tokens=120, temperature=0)


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: its name
    """
    return f"It is clear in {city}."


def run(agent: ToolCallingAgent) -> None:
    """Let an agent take two steps, and look at what it called."""
    with contextlib.redirect_stdout(sys.stderr):  # it tells there what it does, and our report stands alone
        assert agent.run("What is the weather in Paris?") is not None
    calls = list(called(agent.memory.steps))
    assert calls, agent.memory.steps
    assert set(calls) <= {"get_weather", "final_answer"}, calls


def called(steps: list[Any]) -> Iterator[str]:
    for step in steps:
        for call in getattr(step, "tool_calls", None) or ():
            yield call.name


@checks.that("the model alone, with its usage")
def whole(server: Server) -> None:
    reply = model(server).generate(ASKED)
    assert reply.content
    assert reply.token_usage.input_tokens > 0
    assert reply.token_usage.output_tokens > 0


@checks.that("the model alone, streamed")
def streamed(server: Server) -> None:
    pieces, usage = Pieces(), None
    for delta in model(server).generate_stream(ASKED):
        pieces.add(delta.content)
        usage = delta.token_usage or usage
    pieces.came_over_time()
    assert usage is not None
    assert usage.output_tokens >= 4


@checks.that("an answer by a schema")
def schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    assert json.loads(model(server).generate(ASKED, response_format=form).content)["city"] in {"Paris", "Rome"}


@checks.that("ToolCallingAgent: every step is a call that fits")
def agent(server: Server) -> None:
    run(ToolCallingAgent(tools=[get_weather], model=model(server), max_steps=2, verbosity_level=0))


@checks.that("ToolCallingAgent, streamed")
def agent_streamed(server: Server) -> None:
    options = {"max_steps": 2, "verbosity_level": 0, "stream_outputs": True}
    run(ToolCallingAgent(tools=[get_weather], model=model(server), **options))


@checks.that("CodeAgent with structured outputs")
def code(server: Server) -> None:
    options = {"max_steps": 1, "verbosity_level": 0, "use_structured_outputs_internally": True}
    acting = CodeAgent(tools=[], model=model(server), **options)
    with contextlib.redirect_stdout(sys.stderr):
        acting.run("What is 2 + 2?")
    assert acting.memory.steps[1].model_output


checks.run()
