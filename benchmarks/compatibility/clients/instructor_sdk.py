"""Instructor: answers as Pydantic models."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pydantic
from checking import Checks, Server
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

checks = Checks(("instructor", "openai"))


class Person(pydantic.BaseModel):
    """A person, and nothing more: where a schema allows further fields, a weak model never ends."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=10, le=99)


def client(server: Server, mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=server.openai_url, api_key=server.key, max_retries=0, timeout=80), mode=mode
    )


def invent(server: Server, mode: instructor.Mode, **options: Any) -> Any:
    told = {"max_tokens": 80, "temperature": 0, "max_retries": 0, **options}
    return client(server, mode).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Invent a person."}],
        response_model=Person,
        **told,
    )


@checks.that("mode TOOLS, the default")
def tools(server: Server) -> None:
    assert isinstance(invent(server, instructor.Mode.TOOLS), Person)


@checks.that("mode TOOLS_STRICT")
def strict(server: Server) -> None:
    assert isinstance(invent(server, instructor.Mode.TOOLS_STRICT), Person)


@checks.that("mode JSON_SCHEMA")
def schema(server: Server) -> None:
    assert isinstance(invent(server, instructor.Mode.JSON_SCHEMA), Person)


@checks.that("mode JSON: the protocol, as the model is weak")
def json_mode(server: Server) -> None:
    """The schema stands in the prompt alone: what comes is an object, and rarely the right one."""
    said = ""
    try:
        assert isinstance(invent(server, instructor.Mode.JSON, max_tokens=200), Person)
    except (
        pydantic.ValidationError,
        InstructorRetryException,
        IncompleteOutputException,
    ) as error:
        said = str(error)
    assert "Error code" not in said, said


@checks.that("create_partial: a model that fills while it streams")
def partial(server: Server) -> None:
    seen = list(
        client(server, instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_model=Person,
            max_tokens=80,
            temperature=0,
            max_retries=0,
        )
    )
    assert len(seen) >= 3
    assert Person(**seen[-1].model_dump())


checks.run()
