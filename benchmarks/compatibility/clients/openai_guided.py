"""OpenAI's SDK for Python: what vLLM takes beside OpenAI's fields, and constraints beside tools and in responses."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import openai
from checking import Server, refused
from openai_sdk import ASK, NAMED, WEATHER, Person, checks, sdk

SCHEMA = Person.model_json_schema()
GRAMMAR = 'root ::= "yes" | "no"'


def said(server: Server, **extra: Any) -> str:
    with sdk(server) as client:
        reply = client.chat.completions.create(
            model=server.model, messages=ASK, max_tokens=60, temperature=0.7, seed=3, extra_body=extra
        )
        return reply.choices[0].message.content or ""


@checks.that("structured_outputs: a choice, a regular expression, a grammar, a schema")
def structured_outputs(server: Server) -> None:
    assert said(server, structured_outputs={"choice": ["sunny", "rainy"]}) in {"sunny", "rainy"}
    assert re.fullmatch(r"[0-9]{2} degrees", said(server, structured_outputs={"regex": r"[0-9]{2} degrees"}))
    assert said(server, structured_outputs={"grammar": GRAMMAR}) in {"yes", "no"}
    Person.model_validate_json(said(server, structured_outputs={"json": SCHEMA}))


@checks.that("completions: structured_outputs")
def structured_completion(server: Server) -> None:
    with sdk(server) as client:
        reply = client.completions.create(
            model=server.model,
            prompt="The sky is",
            max_tokens=8,
            extra_body={"structured_outputs": {"choice": ["blue", "green"]}},
        )
        assert reply.choices[0].text in {"blue", "green"}


@checks.that("structured_outputs: two constraints, and one that is none, are refused")
def structured_refused(server: Server) -> None:
    for wrong in ({"choice": ["a"], "regex": "b"}, {"regex": "("}):
        refused(openai.BadRequestError, functools.partial(said, server, structured_outputs=wrong))


@checks.that("a schema beside tools: a call by name, and an answer without one")
def schema_beside_tools(server: Server) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": server.model, "messages": ASK, "max_tokens": 80, "temperature": 0.7, "seed": 3}
    with sdk(server) as client:
        called = client.chat.completions.create(**asked, response_format=wanted, tools=[WEATHER], tool_choice=NAMED)
        (call,) = called.choices[0].message.tool_calls or ()
        assert set(json.loads(call.function.arguments)) == {"city", "celsius"}
        plain = client.chat.completions.create(**asked, response_format=wanted, tools=[WEATHER], tool_choice="none")
        Person.model_validate_json(plain.choices[0].message.content or "")
        free = client.chat.completions.create(**asked, response_format=wanted, tools=[WEATHER], tool_choice="auto")
        if not free.choices[0].message.tool_calls:
            Person.model_validate_json(free.choices[0].message.content or "")


@checks.that("responses: logprobs, whole and streamed")
def responses_logprobs(server: Server) -> None:
    asked: Any = {
        "model": server.model,
        "input": "Say hello.",
        "max_output_tokens": 6,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    with sdk(server) as client:
        (message,) = client.responses.create(**asked).output
        (part,) = message.content
        assert "".join(entry.token for entry in part.logprobs) == part.text
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in part.logprobs)
        deltas = [event for event in client.responses.create(**asked, stream=True) if "text.delta" in event.type]
        assert sum(len(event.logprobs) for event in deltas) >= 4


@checks.that("responses: a seed, a stop string and a choice, as vLLM takes them")
def responses_extra(server: Server) -> None:
    with sdk(server) as client:

        def told(**extra: Any) -> str:
            return client.responses.create(
                model=server.model, input="Tell a story of the sea.", max_output_tokens=24, extra_body=extra
            ).output_text

        assert told(seed=5) == told(seed=5)
        assert " " not in told(seed=5, stop=[" "])
        assert told(structured_outputs={"choice": ["sunny", "rainy"]}) in {"sunny", "rainy"}
