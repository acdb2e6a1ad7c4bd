"""Tools in the words of each server: what a request offers and what its history called travel on."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from router.upstream.codec.dialect import DIALECTS, OVERSPILL, Dialect
from router.upstream.codec.openai import encode_request
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.tool_calls import Tool, ToolCall, ToolChoice, Tools

WEATHER = Tool("weather", "The weather in a city.", '{"type":"object","required":["city"]}')
CLOCK = Tool("clock", strict=True)


def told(dialect: Dialect, tools: Tools | None, *messages: Message) -> dict[str, Any]:
    prompt = ChatPrompt((Message("user", "And the weather?"), *messages), tools)
    request = InferenceRequest("r", "m", prompt, SamplingParams(), Objective(), 5, 0.0)
    body: dict[str, Any] = json.loads(encode_request(request, "m", 100, dialect))
    return body


@pytest.mark.parametrize("dialect", [OVERSPILL, DIALECTS["vllm"], DIALECTS["plain"]], ids=lambda one: one.name)
def test_tools_and_the_choice_among_them_are_sent(dialect: Dialect) -> None:
    body = told(dialect, Tools((WEATHER, CLOCK), named="weather", choice=ToolChoice.REQUIRED))
    functions = [tool["function"] for tool in body["tools"]]
    assert [function["name"] for function in functions] == ["weather", "clock"]
    assert functions[0]["parameters"] == {"type": "object", "required": ["city"]}
    assert functions[0]["description"] == "The weather in a city."
    assert functions[1]["strict"] is True
    assert functions[0].get("strict") is (True if dialect.tools == "strictly" else None)
    assert body["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    auto = told(dialect, Tools((WEATHER,), parallel=False))
    assert (auto["tool_choice"], auto["parallel_tool_calls"]) == ("auto", False)
    assert "strict" not in auto["tools"][0]["function"]


def test_what_was_called_and_what_came_of_it_is_sent() -> None:
    called = Message("assistant", "", tool_calls=(ToolCall("c1", "weather", '{"city":"Paris"}'),))
    body = told(DIALECTS["vllm"], None, called, Message("tool", "clear", call_id="c1"))
    assert "tools" not in body
    assert body["messages"][1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    ]
    assert body["messages"][2] == {"role": "tool", "content": "clear", "tool_call_id": "c1"}


def test_a_schema_goes_on_however_deep_it_nests() -> None:
    """Whoever compiles it names the field and the limit."""
    deep = '{"properties":{"a":' * 300 + "{}" + "}}" * 300
    (tool,) = told(OVERSPILL, Tools((Tool("f", "", deep),)))["tools"]
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, deep, param="response_format.json_schema.schema")
    wanted = OVERSPILL.constraints[constraint.kind](constraint)["response_format"]
    schema = json.loads(orjson.dumps(wanted))["json_schema"]["schema"]
    for found in (tool["function"]["parameters"], schema):
        assert json.dumps(found, separators=(",", ":")) == deep
