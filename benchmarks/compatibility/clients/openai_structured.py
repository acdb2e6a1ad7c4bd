"""OpenAI's SDK for Python: structured answers and tools."""

from __future__ import annotations

import json

from checking import Pieces, Server
from openai_sdk import ASK, NAMED, WEATHER, Person, checks, sdk


@checks.that("response_format: json_object")
def json_object(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": 'Answer with JSON like {"city": "Paris"}. A city?'}],
            response_format={"type": "json_object"},
            max_tokens=160,
            temperature=0,
        )
        told = reply.choices[0]
        if told.finish_reason == "length":  # a weak model may go on for ever, but only with an object
            assert (told.message.content or "").lstrip().startswith("{")
        else:
            assert isinstance(json.loads(told.message.content or ""), dict)


@checks.that("response_format: json_schema by parse()")
def parse(server: Server) -> None:
    with sdk(server) as client:
        reply = client.chat.completions.parse(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=Person,
            max_tokens=80,
            temperature=0.7,
            seed=3,
        )
        told = reply.choices[0].message.parsed
        assert isinstance(told, Person)
        assert 10 <= told.age <= 99


@checks.that("response_format: json_schema, streamed")
def parse_stream(server: Server) -> None:
    with (
        sdk(server) as client,
        client.chat.completions.stream(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format=Person,
            max_tokens=80,
            temperature=0.7,
            seed=3,
        ) as told,
    ):
        kinds = [event.type for event in told]
        parsed = told.get_final_completion().choices[0].message.parsed
    assert kinds.count("content.delta") >= 4
    assert isinstance(parsed, Person)


@checks.that("tools: call by name, result sent back, answer")
def tools(server: Server) -> None:
    with sdk(server) as client:
        first = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], tool_choice=NAMED, max_tokens=60, temperature=0
        )
        (call,) = first.choices[0].message.tool_calls or ()
        told = json.loads(call.function.arguments)
        assert call.function.name == "get_weather"
        assert told["city"] in {"Paris", "Rome"}
        assert isinstance(told["celsius"], bool)
        assert call.id
        history = [
            *ASK,
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear", "degrees": 21}'},
        ]
        second = client.chat.completions.create(
            model=server.model, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=16
        )
        assert second.choices[0].message.content
        assert not second.choices[0].message.tool_calls


@checks.that("tools: required")
def tools_required(server: Server) -> None:
    with sdk(server) as client:
        told = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=120, temperature=0
        ).choices[0]
        assert told.finish_reason == "tool_calls"
        calls = told.message.tool_calls or []
        assert calls
        for call in calls:
            assert set(json.loads(call.function.arguments)) == {"city", "celsius"}


@checks.that("tools: auto, where the model may answer in words")
def tools_auto(server: Server) -> None:
    with sdk(server) as client:
        told = client.chat.completions.create(
            model=server.model, messages=ASK, tools=[WEATHER], max_tokens=40, temperature=0
        ).choices[0]
        assert told.message.content or told.message.tool_calls
        assert (told.finish_reason == "tool_calls") == bool(told.message.tool_calls)


@checks.that("tools: streamed in pieces")
def tools_stream(server: Server) -> None:
    arguments, names, finished = Pieces(), [], None
    with sdk(server) as client:
        for chunk in client.chat.completions.create(
            model=server.model,
            messages=ASK,
            tools=[WEATHER],
            tool_choice=NAMED,
            max_tokens=90,
            temperature=0,
            stream=True,
        ):
            for choice in chunk.choices:
                finished = choice.finish_reason or finished
                for call in choice.delta.tool_calls or ():
                    assert call.index == 0
                    names += [call.function.name] if call.function and call.function.name else []
                    arguments.add(call.function.arguments if call.function else None)
    assert names == ["get_weather"]
    assert set(json.loads(arguments.text)) == {"city", "celsius"}
    assert finished in {"tool_calls", "stop"}
    assert len(arguments.texts) >= 3, arguments.texts
