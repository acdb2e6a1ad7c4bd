"""Anthropic's SDK: messages whole and streamed, tools, schemas, counting, models, errors."""

from __future__ import annotations

import json

import anthropic
from checking import Checks, Server, refused

checks = Checks(("anthropic",))
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def client(server: Server, key: str = "") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key or server.key, max_retries=0)


@checks.that("messages, whole: text, usage, the request's id")
def whole(server: Server) -> None:
    told = client(server).messages.create(
        model=server.model, max_tokens=24, messages=QUESTION, extra_body={"temperature": 0}
    )
    assert told.content[0].text
    assert told.usage.input_tokens > 5 < told.usage.output_tokens
    assert told._request_id  # noqa: SLF001 - the SDK documents it as public


@checks.that("messages, streamed: the text grows to the final message")
def streamed(server: Server) -> None:
    with client(server).messages.stream(model=server.model, max_tokens=24, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert final.stop_reason in {"end_turn", "max_tokens"}


@checks.that("a tool called, its result sent back")
def tools(server: Server) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "tool", "name": "get_weather"}
    create = client(server).messages.create
    called = create(model=server.model, max_tokens=60, messages=asked, tools=[WEATHER], tool_choice=choice)
    call = called.content[-1]
    assert (called.stop_reason, call.name) == ("tool_use", "get_weather")
    assert isinstance(call.input["city"], str)
    back = [
        *asked,
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    assert create(model=server.model, max_tokens=16, messages=back, tools=[WEATHER]).content


@checks.that("an answer by a schema")
def schema(server: Server) -> None:
    wanted = {"format": {"type": "json_schema", "schema": PERSON}}
    told = client(server).messages.create(
        model=server.model,
        max_tokens=80,
        messages=[{"role": "user", "content": "A person, as JSON."}],
        extra_body={"output_config": wanted},
    )
    assert set(json.loads(told.content[0].text)) == {"name", "age"}


@checks.that("an answer that goes on, a stop sequence")
def goes_on(server: Server) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    told = client(server).messages.create(
        model=server.model, max_tokens=24, messages=turns, stop_sequences=["Paris"], extra_body={"temperature": 0}
    )
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "Paris")


@checks.that("tokens counted, models listed")
def counted(server: Server) -> None:
    api = client(server)
    assert api.messages.count_tokens(model=server.model, messages=QUESTION).input_tokens > 5
    assert server.model in [model.id for model in api.models.list(limit=1)]
    assert api.models.retrieve(server.model).id == server.model


@checks.that("errors: an unknown model, a wrong key, a promise that cannot be kept")
def errors(server: Server) -> None:
    create = client(server).messages.create
    refused(anthropic.NotFoundError, lambda: create(model="none", max_tokens=4, messages=QUESTION))
    stranger = client(server, "wrong").messages.create
    refused(anthropic.AuthenticationError, lambda: stranger(model=server.model, max_tokens=4, messages=QUESTION))
    soon = {"x-overspill-deadline-ms": "1"}
    refused(
        anthropic.APIStatusError,
        lambda: create(model=server.model, max_tokens=99, messages=QUESTION, extra_headers=soon),
    )


checks.run()
