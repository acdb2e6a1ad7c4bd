"""Tools of /v1/responses that are no plain functions: in namespaces, those that take text, those that OpenAI runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from router.values.tool_calls import call_text
from tests.support.gateway_fakes import FAMILY, Server, gateway_deps, serving


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": None, "parameters": {"type": "object"}, "strict": None}


AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [function("close"), function("open")],
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Takes a patch.", "format": {"type": "text"}}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": True}
TEXT = 'a "quoted"\tline\n\\ and 𝄞 é'


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(gateway_deps()) as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def said(name: str, arguments: dict[str, Any]) -> str:
    return f"say {call_text(name, json.dumps(arguments))}".replace("\n", " ")


def test_a_call_of_a_tool_in_a_namespace_tells_both_names(server: Server) -> None:
    asked = {"model": FAMILY, "input": said("agents__close", {"id": "7"}), "tools": [AGENTS]}
    reply = httpx.post(f"{server.url}/v1/responses", json=asked)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "close")
    assert reply.json()["tools"] == [AGENTS]
    offered = server.dispatcher.requests[-1].prompt.tools.offered
    assert [tool.name for tool in offered] == ["agents__close", "agents__open"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "closed"}
    history = [{"role": "user", "content": "x"}, call, result, {"role": "user", "content": "say ok"}]
    assert httpx.post(f"{server.url}/v1/responses", json={**asked, "input": history}).status_code == 200
    assert server.dispatcher.requests[-1].prompt.messages[1].tool_calls[0].name == "agents__close"


@pytest.mark.parametrize("name", ["close", "agents__close"])
def test_a_tool_in_a_namespace_is_chosen_by_either_name(server: Server, name: str) -> None:
    asked = {"model": FAMILY, "input": "say x", "tools": [AGENTS], "tool_choice": {"type": "function", "name": name}}
    assert httpx.post(f"{server.url}/v1/responses", json=asked).status_code == 200
    assert server.dispatcher.requests[-1].prompt.tools.named == "agents__close"


def test_a_custom_tool_is_called_with_text(server: Server, sdk: openai.OpenAI) -> None:
    tools: Any = [PATCH]
    choice: Any = {"type": "custom", "name": "patch"}
    found = sdk.responses.create(model=FAMILY, input=said("patch", {"input": TEXT}), tools=tools, tool_choice=choice)
    (call,) = found.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("patch", TEXT)
    asked = server.dispatcher.requests[-1].prompt.tools
    assert asked.named == "patch"
    assert json.loads(asked.offered[0].parameters)["required"] == ["input"]
    of_model: Any = call.to_dict()
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    sdk.responses.create(
        model=FAMILY,
        input=[{"role": "user", "content": "x"}, of_model, result, {"role": "user", "content": "say ok"}],
        tools=tools,
    )
    turns = server.dispatcher.requests[-1].prompt.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "user"]
    assert json.loads(turns[1].tool_calls[0].arguments) == {"input": TEXT}
    assert turns[1].tool_calls[0].call_id == turns[2].call_id == call.call_id


def test_the_text_of_a_custom_call_is_streamed_as_text(sdk: openai.OpenAI) -> None:
    tools: Any = [PATCH]
    events = list(sdk.responses.create(model=FAMILY, input=said("patch", {"input": TEXT}), tools=tools, stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert ("".join(pieces), done.input) == (TEXT, TEXT)
    last: Any = events[-1]
    assert last.response.output[0].input == TEXT


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_search_of_the_web_that_nobody_runs_here_is_not_offered(server: Server, choice: str | None) -> None:
    asked = {"model": FAMILY, "input": "say x", "tools": [PATCH, SEARCH, {"type": "image_generation"}]}
    reply = httpx.post(f"{server.url}/v1/responses", json=asked if choice is None else {**asked, "tool_choice": choice})
    assert reply.status_code == 200, reply.text
    assert reply.json()["tools"] == [PATCH]
    assert [tool.name for tool in server.dispatcher.requests[-1].prompt.tools.offered] == ["patch"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SEARCH], "tool_choice": "required"}, "tools[0]"),
        ({"tools": [PATCH, SEARCH], "tool_choice": {"type": "web_search"}}, "tools[1]"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "tools[0]"),
        ({"tools": [{**AGENTS, "tools": []}]}, "tools[0].tools"),
        ({"tools": [{**AGENTS, "tools": [SEARCH]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [AGENTS], "tool_choice": {"type": "function", "name": "shut"}}, "tool_choice"),
    ],
)
def test_what_is_not_served_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{server.url}/v1/responses", json={"model": FAMILY, "input": "say x", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
