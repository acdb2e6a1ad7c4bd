"""Structured output through the real openai SDK: on either tier, cut and continued on the other one, and refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from examples.demo.stack import API_KEY, Stack
from tests.support.patience import PATIENT

pytestmark = pytest.mark.real_model

MODEL = "smollm2-135m"
CITY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Describe the city of Paris as JSON."}]


class Place(BaseModel, extra="forbid"):
    """Nothing in it is without an end: a small model may never find one."""

    kind: Literal["city", "river", "mountain"]
    name: str = Field(max_length=20)
    population: int | None = Field(ge=0, le=99_999_999)
    known_for: list[Annotated[str, Field(max_length=20)]] = Field(max_length=2)


def test_parse_returns_the_model_that_was_asked_for(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=CITY, response_format=Place, temperature=0, max_tokens=300
    )
    assert isinstance(reply.choices[0].message.parsed, Place)
    assert reply.choices[0].finish_reason == "stop"


def test_a_streamed_answer_parses_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=CITY, response_format=Place, temperature=0.7, seed=3, max_tokens=300
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Place)


def test_too_few_tokens_end_by_length(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=CITY, response_format=Place, max_tokens=4)


@pytest.mark.parametrize("choice", ["yes", "Hello World", "NaN"])
def test_a_cap_that_it_just_fits_cuts_nothing(client: openai.OpenAI, choice: str) -> None:
    def ask(max_tokens: int) -> tuple[str, str, int]:
        extra = {"structured_outputs": {"choice": [choice]}}
        reply = client.completions.create(
            model=MODEL, prompt="It is", temperature=0, max_tokens=max_tokens, extra_body=extra
        )
        assert reply.usage is not None
        return reply.choices[0].text, reply.choices[0].finish_reason, reply.usage.completion_tokens

    needed = ask(60)[2]
    assert ask(60) == ask(needed) == (choice, "stop", needed)


@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_what_one_tier_began_the_other_ends(stack: Stack, client: openai.OpenAI, tier: str, tokens: int) -> None:
    schema: dict[str, Any] = {"name": "place", "schema": Place.model_json_schema()}
    asked: dict[str, Any] = {"model": MODEL, "messages": CITY, "temperature": 0.8, "seed": tokens}
    asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    begun = client.chat.completions.create(**asked, max_tokens=tokens).choices[0].message.content
    other = stack.cloud_url if tier == "edge" else stack.edge_url
    body = {**asked, "messages": [*CITY, {"role": "assistant", "content": begun}], "max_tokens": 300}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    headers = {"authorization": f"Bearer {API_KEY}", **PATIENT}
    reply = httpx.post(f"{other}/v1/chat/completions", json=body, headers=headers, timeout=300).json()
    Place.model_validate_json(begun + reply["choices"][0]["message"]["content"])


def test_a_regular_expression_a_choice_and_a_grammar(client: openai.OpenAI) -> None:
    def ask(**structured: Any) -> str:
        extra = {"structured_outputs": structured}
        reply = client.completions.create(model=MODEL, prompt="My number:", max_tokens=60, extra_body=extra)
        return reply.choices[0].text

    assert re.fullmatch(r"\+\d{2} \d{3}-\d{4}", ask(regex=r"\+\d{2} \d{3}-\d{4}"))
    assert ask(choice=["seven", "eight"]) in {"seven", "eight"}
    counted = ask(grammar='root ::= n ("," " " n){0,3} "."\nn ::= "one" | "two"')
    assert re.fullmatch(r"(one|two)(, (one|two)){0,3}\.", counted)


@pytest.mark.parametrize(
    ("structured", "param"),
    [
        ({"regex": "(?=a)b"}, "structured_outputs.regex"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json"),
        ({"json": {"properties": {f"p{i}": {"pattern": "x" * 900} for i in range(90)}}}, "structured_outputs.json"),
    ],
)
def test_what_cannot_be_enforced_is_a_400_by_name(client: openai.OpenAI, structured: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CITY, extra_body={"structured_outputs": structured})
    assert refused.value.param == param
    assert "cannot be enforced" in refused.value.message
