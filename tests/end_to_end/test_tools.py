"""Tools through the real openai SDK, on either tier: called, streamed, answered, cut and continued elsewhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from examples.demo.stack import API_KEY, Stack
from tests.support.patience import PATIENT

pytestmark = pytest.mark.real_model

MODEL = "smollm2-135m"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris tomorrow?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "get-time", "description": "The time."}}
BASE: dict[str, Any] = {
    "model": MODEL,
    "messages": ASKED,
    "tools": [WEATHER, CLOCK],
    "temperature": 0,
    "max_tokens": 200,
}


def arguments(call: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(found) == {"city", "days"}
        assert isinstance(found["days"], int)
    return found


def test_a_named_tool_is_called_with_arguments_by_its_schema(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = client.chat.completions.create(**BASE, tool_choice=named).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.startswith("call_")
    assert choice.message.content is None
    arguments(call)


def test_a_required_call_is_streamed_in_pieces(client: openai.OpenAI) -> None:
    calls: dict[int, dict[str, str]] = {}
    pieces, reasons = 0, []
    for chunk in client.chat.completions.create(**BASE, tool_choice="required", parallel_tool_calls=False, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index not in calls:
                assert delta.id
                assert delta.function.name
                calls[delta.index] = {"name": delta.function.name, "arguments": ""}
            else:
                assert delta.id is None
                assert delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments or ""
            pieces += 1
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "tool_calls"
    assert len(calls) == 1
    assert isinstance(json.loads(calls[0]["arguments"]), dict)
    assert pieces >= 2


def test_none_and_auto_answer_in_text_and_a_turn_with_results_goes_on(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**{**BASE, "max_tokens": 20}, tool_choice="none").choices[0]
    assert reply.message.tool_calls is None
    assert reply.message.content
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 24 degrees."},
    ]
    answered = client.chat.completions.create(**{**BASE, "messages": history, "max_tokens": 40}).choices[0]
    assert answered.message.content or answered.message.tool_calls


def test_functions_are_called_in_the_older_way(client: openai.OpenAI) -> None:
    body = {**BASE, "functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    del body["tools"]
    choice = client.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "get_weather"
    assert set(json.loads(choice.message.function_call.arguments)) == {"city", "days"}


@pytest.mark.parametrize("tokens", [3, 9, 15, 22])
def test_a_call_that_one_tier_began_the_other_ends(stack: Stack, client: openai.OpenAI, tier: str, tokens: int) -> None:
    """What goes between tiers is the call as text: here it is cut after so many tokens."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    tokenizer_text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}\n</tool_call>'
    said = tokenizer_text[: 4 * tokens]
    other = stack.cloud_url if tier == "edge" else stack.edge_url
    body = {**BASE, "messages": [*ASKED, {"role": "assistant", "content": said}], "tool_choice": named}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    headers = {"authorization": f"Bearer {API_KEY}", "x-overspill-hops": "1", **PATIENT}
    reply = httpx.post(f"{other}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("said", ["<tool_call>\n", '<tool_call>\n{"name": "get_weather", '])
def test_a_call_that_a_client_began_is_told_whole(client: openai.OpenAI, said: str) -> None:
    body = {**BASE, "messages": [*ASKED, {"role": "assistant", "content": said}], "parallel_tool_calls": False}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    choice = client.chat.completions.create(**body, extra_body=extra).choices[0]
    (call,) = choice.message.tool_calls
    assert (bool(call.id), choice.finish_reason) == (True, "tool_calls")
    arguments(call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**BASE, **fields})
    assert refused.value.param == param


@pytest.mark.parametrize("locality", ["any", "cloud-only"])
def test_a_schema_that_nests_too_deep_is_named_wherever_it_goes(edge: openai.OpenAI, locality: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": deep}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep}}
    asked: list[dict[str, Any]] = [{"tools": [tool]}, {"tools": None, "response_format": schema}]
    for fields in asked:
        sent = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
        with pytest.raises(openai.BadRequestError) as refused:
            edge.chat.completions.create(**sent, extra_headers={"x-overspill-locality": locality})
        assert refused.value.param == ("tools" if "tools" in sent else "response_format.json_schema.schema")
        assert "levels, at most 64 are compiled" in refused.value.message
