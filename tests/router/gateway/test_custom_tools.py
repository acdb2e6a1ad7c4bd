"""Custom tools of /v1/chat/completions: called with text, told as text, and taken back in the history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from router.values.tool_calls import call_text
from tests.support.gateway_fakes import FAMILY, Server, gateway_deps, serving

PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Takes a patch.", "format": {"type": "text"}},
}
CLOSE: dict[str, Any] = {"type": "function", "function": {"name": "close", "parameters": {"type": "object"}}}
TEXT = 'a "quoted"\tline\n\\ and 𝄞 é'


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(gateway_deps()) as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def asked(name: str, arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    said = f"say {call_text(name, json.dumps(arguments))}".replace("\n", " ")
    return {"model": FAMILY, "messages": [{"role": "user", "content": said}], "tools": [PATCH, CLOSE], **fields}


def test_a_custom_tool_is_called_with_text_and_the_call_comes_back(server: Server, sdk: openai.OpenAI) -> None:
    body = asked("patch", {"input": TEXT})
    choice = sdk.chat.completions.create(**body).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", TEXT)
    shown = server.dispatcher.requests[-1].prompt.tools.offered[0]
    assert (shown.name, shown.description, shown.strict) == ("patch", "Takes a patch.", True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history = [*body["messages"], choice.message, result, {"role": "user", "content": "say ok"}]
    sdk.chat.completions.create(**{**body, "messages": history})
    (kept,) = server.dispatcher.requests[-1].prompt.messages[1].tool_calls
    assert (kept.name, json.loads(kept.arguments)) == ("patch", {"input": TEXT})


def test_its_text_is_streamed_as_text(sdk: openai.OpenAI) -> None:
    calls = [
        call
        for event in sdk.chat.completions.create(**asked("patch", {"input": TEXT}, stream=True))
        for choice in event.choices
        for call in choice.delta.tool_calls or []
    ]
    assert (calls[0].id[:5], calls[0].type, calls[0].custom["name"]) == ("call_", "custom", "patch")
    assert {call.index for call in calls} == {0}
    assert [call.type for call in calls[1:]] == [None] * len(calls[1:])
    assert "".join(call.custom["input"] for call in calls) == TEXT


def test_a_function_beside_it_stays_one(sdk: openai.OpenAI) -> None:
    (call,) = sdk.chat.completions.create(**asked("close", {"id": 7})).choices[0].message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "close", {"id": 7})


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ],
)
def test_it_may_be_chosen(server: Server, sdk: openai.OpenAI, choice: dict[str, Any]) -> None:
    sdk.chat.completions.create(**asked("patch", {"input": "x"}, tool_choice=choice))
    assert [tool.name for tool in server.dispatcher.requests[-1].prompt.tools.callable] == ["patch"]


GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": GRAMMAR}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tools": [PATCH, {"type": "function", "function": {"name": "patch"}}]}, "tools"),
    ],
)
def test_what_is_not_served_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={**asked("a", {}), **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
