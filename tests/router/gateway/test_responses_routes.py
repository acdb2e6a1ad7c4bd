"""/v1/responses through the real openai SDK: whole, streamed, parsed, with tools, and what it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import FunctionToolParam, ResponseCompletedEvent, ResponseFunctionToolCall
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import BaseModel

from router.values.constraint import ConstraintKind
from router.values.tool_calls import ToolChoice, call_text
from tests.support.gateway_fakes import FAMILY, Server, gateway_deps, serving

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(gateway_deps()) as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_a_whole_response_repeats_what_was_asked(server: Server, sdk: openai.OpenAI) -> None:
    found = sdk.responses.create(
        model=FAMILY, input="say hello world", instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"}
    )
    assert (found.output_text, found.status, found.object) == ("hello world", "completed", "response")
    assert (found.instructions, found.max_output_tokens, found.metadata) == ("Be brief.", 9, {"a": "b"})
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.store is False  # type: ignore[attr-defined]
    asked = server.dispatcher.requests[-1]
    assert [message.role for message in asked.prompt.messages] == ["system", "user"]
    assert asked.sampling.max_tokens == 9


def test_the_events_come_in_the_order_of_the_api(sdk: openai.OpenAI) -> None:
    events = list(sdk.responses.create(model=FAMILY, input="say one two three", stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas >= 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "one two three"
    assert events[-1].response.output_text == "one two three"


def test_the_helper_of_the_sdk_gathers_a_stream(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model=FAMILY, input="say one two") as stream:
        assert stream.get_final_response().output_text == "one two"


class Place(BaseModel):
    city: str


def test_parse_asks_for_a_schema_and_reads_the_answer(server: Server, sdk: openai.OpenAI) -> None:
    found = sdk.responses.parse(model=FAMILY, input='say {"city":"Paris"}', text_format=Place)
    assert found.output_parsed == Place(city="Paris")
    constraint = server.dispatcher.requests[-1].sampling.constraint
    assert constraint is not None
    assert (constraint.kind, constraint.strict, constraint.name) == (ConstraintKind.JSON_SCHEMA, True, "Place")


def test_a_call_is_an_item_and_its_result_goes_back_in(server: Server, sdk: openai.OpenAI) -> None:
    asked = f"say {call_text('weather', json.dumps({'city': 'Paris'}))}".replace("\n", " ")
    found = sdk.responses.create(model=FAMILY, input=asked, tools=[WEATHER], tool_choice="required")
    (call,) = found.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    tools = server.dispatcher.requests[-1].prompt.tools
    assert (tools.choice, tools.offered[0].strict) == (ToolChoice.REQUIRED, True)
    of_model: Any = call.to_dict()
    result: FunctionCallOutput = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    sdk.responses.create(
        model=FAMILY,
        input=[{"role": "user", "content": "x"}, of_model, result, {"role": "user", "content": "say ok"}],
        tools=[WEATHER],
    )
    turns = server.dispatcher.requests[-1].prompt.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "user"]
    assert turns[1].tool_calls[0].call_id == turns[2].call_id == call.call_id


def test_a_streamed_call_has_its_own_events(sdk: openai.OpenAI) -> None:
    asked = f"say well {call_text('weather', json.dumps({'city': 'Paris'}))}".replace("\n", " ")
    events = list(sdk.responses.create(model=FAMILY, input=asked, tools=[WEATHER], stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    final = last.response
    assert [item.type for item in final.output] == ["message", "function_call"]
    call = final.output[1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_some_of_the_tools_may_be_allowed(server: Server) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("a", "b")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    asked = {"model": FAMILY, "input": "say x", "tools": tools, "tool_choice": choice}
    reply = httpx.post(f"{server.url}/v1/responses", json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["tool_choice"] == choice
    offered = server.dispatcher.requests[-1].prompt.tools
    assert [tool.name for tool in offered.offered] == ["b"]
    choice["tools"] = [{"type": "function", "name": "c"}]
    reply = httpx.post(f"{server.url}/v1/responses", json=asked)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"summary": 3}}, "reasoning.summary"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["reasoning.summaries"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "system", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_what_is_not_served_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{server.url}/v1/responses", json={"model": FAMILY, "input": "say x", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_caller_that_wants_its_answer_kept_is_told_that_it_is_not(server: Server) -> None:
    reply = httpx.post(f"{server.url}/v1/responses", json={"model": FAMILY, "input": "say x", "store": True})
    assert (reply.status_code, reply.json()["store"]) == (200, False)


def test_a_conversation_that_fits_needs_no_truncation_and_one_that_does_not_is_refused(sdk: openai.OpenAI) -> None:
    """Of what OpenAI's own client may send; its reply has to name the value that was asked for."""
    found = sdk.responses.create(model=FAMILY, input="say one two", truncation="auto")
    assert (found.output_text, found.truncation) == ("one two", "auto")
    with pytest.raises(openai.BadRequestError) as told:
        sdk.responses.create(model=FAMILY, input="refuse long", truncation="auto")
    assert told.value.code == "context_length_exceeded"


def test_a_stream_that_breaks_ends_with_a_failed_response(sdk: openai.OpenAI) -> None:
    """Codex looks for no other end: without it, it asks five times again for what broke."""
    events: list[Any] = list(sdk.responses.create(model=FAMILY, input="break one two", stream=True))
    kinds = [event.type for event in events]
    assert kinds[-2:] == ["error", "response.failed"]
    response = events[-1].response
    assert (response.status, response.error.message) == ("failed", events[-2].message)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_cut_answer_is_incomplete(sdk: openai.OpenAI) -> None:
    found = sdk.responses.create(model=FAMILY, input="say one two three", max_output_tokens=2)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")


LOGPROBS: Any = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("asked", "alternatives"),
    [({**LOGPROBS, "top_logprobs": 1}, 1), ({"top_logprobs": 1}, 1), (LOGPROBS, 0)],
)
def test_log_probabilities_of_a_response(
    server: Server, sdk: openai.OpenAI, asked: dict[str, Any], alternatives: int
) -> None:
    found = sdk.responses.create(model=FAMILY, input="say a é", **asked)
    (message,) = found.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in part.logprobs] == [
        ("a", -1.0, [97]),
        (" é", -1.0, [32, 0xC3, 0xA9]),
    ]
    assert len(part.logprobs[0].top_logprobs) == alternatives
    assert found.top_logprobs == asked.get("top_logprobs", 0)
    assert server.dispatcher.requests[-1].sampling.logprobs == alternatives


def test_log_probabilities_of_a_streamed_response(sdk: openai.OpenAI) -> None:
    events = list(sdk.responses.create(model=FAMILY, input="say a b", stream=True, **LOGPROBS))
    deltas = [
        (event.delta, [entry.token for entry in event.logprobs])
        for event in events
        if event.type == "response.output_text.delta"
    ]
    assert deltas == [("a", ["a"]), (" b", [" b"])]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.token for entry in done.logprobs] == ["a", " b"]
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert [entry["token"] for entry in events[-1].response.to_dict()["output"][0]["content"][0]["logprobs"]] == [  # type: ignore[index]
        "a",
        " b",
    ]


def test_a_call_tells_no_log_probabilities(sdk: openai.OpenAI) -> None:
    asked = f"say {call_text('weather', json.dumps({'city': 'Paris'}))}".replace("\n", " ")
    found = sdk.responses.create(model=FAMILY, input=asked, tools=[WEATHER], **LOGPROBS)
    (call,) = found.output
    assert isinstance(call, ResponseFunctionToolCall)


def test_what_no_tool_here_could_bring_is_included_as_nothing(sdk: openai.OpenAI) -> None:
    found = sdk.responses.create(
        model=FAMILY, input="say ok", include=["reasoning.encrypted_content", "web_search_call.action.sources"]
    )
    assert found.output_text == "ok"
