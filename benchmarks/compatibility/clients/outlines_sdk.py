"""Outlines: answers of a type, by the words of OpenAI, vLLM and SGLang."""

from __future__ import annotations

import re
from typing import Any, Literal

import openai
import outlines
import pydantic
from checking import Checks, Server

checks = Checks(("outlines", "openai"))

LIST = 'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,3}/\n'
ENDING = {"max_tokens": 120, "temperature": 0}


class Person(pydantic.BaseModel):
    """A person, and nothing more."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.openai_url, api_key=server.key, max_retries=0, timeout=80)


@checks.that("from_openai: a Pydantic model")
def as_model(server: Server) -> None:
    said = outlines.from_openai(sdk(server), server.model)("Invent a person.", Person, **ENDING)
    assert Person.model_validate_json(said)


@checks.that("from_openai: a Pydantic model, streamed")
def as_stream(server: Server) -> None:
    model = outlines.from_openai(sdk(server), server.model)
    pieces = list(model.stream("Invent a person.", Person, **ENDING))
    assert len(pieces) >= 3
    assert Person.model_validate_json("".join(pieces))


@checks.that("from_vllm: a choice, a regular expression, a grammar, a model")
def as_vllm(server: Server) -> None:
    kept(outlines.from_vllm(sdk(server), server.model), with_grammar=True)


@checks.that("from_sglang: a choice, a regular expression, a model")
def as_sglang(server: Server) -> None:
    kept(outlines.from_sglang(sdk(server), server.model), with_grammar=False)


def kept(model: Any, *, with_grammar: bool) -> None:
    assert model("Yes or no?", Literal["yes", "no"], **ENDING) in {"yes", "no"}
    assert re.fullmatch(r"[0-9]{3}-[A-F]{2}", model("A number plate:", outlines.regex("[0-9]{3}-[A-F]{2}"), **ENDING))
    assert Person.model_validate_json(model("Invent a person.", Person, **ENDING))
    if with_grammar:
        said = model("A short list:", outlines.cfg(LIST), max_tokens=12, temperature=0)
        assert re.match(r"\[[0-9]", said), said


checks.run()
