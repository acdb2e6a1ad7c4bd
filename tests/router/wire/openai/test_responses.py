"""What bodies of /v1/responses say in the words of chats: it means the same there."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.base.errors import InvalidRequest
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import ChatPrompt
from router.values.request import ApiRequest
from router.wire.openai.chat import decode_chat
from router.wire.openai.responses import decode_responses

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def response(**fields: Any) -> ApiRequest:
    return decode_responses(orjson.dumps({"model": "m", "input": "hello", **fields}))[0]


def chat(**fields: Any) -> ApiRequest:
    return decode_chat(orjson.dumps({"model": "m", "messages": HELLO, **fields}))


AS_IN_CHATS: list[dict[str, Any]] = [
    {"temperature": 0.3, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 7},
    {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2},
    {"stop": ["a", "b"], "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 3},
    {"logit_bias": {"7": -100}, "allowed_token_ids": [7, 8], "bad_words": ["no"]},
    {"max_tokens": 9},
    {"max_completion_tokens": 9},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_regex": "[a-z]+"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "Place", "schema": SCHEMA}}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"cache_salt": "tenant 7", "priority": -3},
]


@pytest.mark.parametrize("fields", AS_IN_CHATS, ids=[next(iter(fields)) for fields in AS_IN_CHATS])
def test_words_of_chats_are_served(fields: dict[str, Any]) -> None:
    assert response(**fields) == chat(**fields)
    assert response(**fields) != response()


def test_a_longest_answer_in_its_own_word_comes_first() -> None:
    assert response(max_output_tokens=5, max_tokens=9).sampling.max_tokens == 5
    assert response().sampling.max_tokens is None


def test_one_constraint_may_be_said_twice_and_two_are_none() -> None:
    told = {"format": {"type": "json_schema", "name": "Place", "schema": SCHEMA}}
    (once, twice) = (response(text=told), response(text=told, structured_outputs={"json": SCHEMA}))
    assert once.sampling.constraint is not None
    assert isinstance(twice.sampling.constraint, Constraint)
    assert (twice.sampling.constraint.kind, twice.sampling.constraint.source) == (
        ConstraintKind.JSON_SCHEMA,
        once.sampling.constraint.source,
    )
    with pytest.raises(InvalidRequest) as raised:
        response(text=told, guided_choice=["a"])
    assert raised.value.param == "guided_choice"


def test_calls_leave_room_for_json_alone() -> None:
    with pytest.raises(InvalidRequest) as raised:
        response(tools=[WEATHER], structured_outputs={"regex": "[a-z]+"})
    assert raised.value.param == "structured_outputs.regex"
    prompt = response(tools=[WEATHER], structured_outputs={"json": SCHEMA}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"min_tokens": 4, "max_output_tokens": 3}, "min_tokens"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"temperature": 2.1}, "temperature"),
        ({"previous_response": {"id": "resp_1"}}, "previous_response"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
)
def test_what_is_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        response(**fields)
    assert raised.value.param == param
