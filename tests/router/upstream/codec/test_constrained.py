"""Constraints in the words of each server, and who is never asked for which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.upstream.codec.dialect import DIALECTS, OVERSPILL, Dialect
from router.upstream.codec.openai import encode_request
from router.values.constraint import ANY_OBJECT, Constraint, ConstraintKind
from router.values.feature import FEATURE_OF, Feature
from router.values.prompt import ChatPrompt, Message
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams

SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"integer"}', name="age")
OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, strict=False)
REGEX = Constraint(ConstraintKind.REGEX, "a+")
CHOICE = Constraint(ConstraintKind.CHOICE, '["a.b","c\\"d"]')
LARK = Constraint(ConstraintKind.LARK, "start: A")
GBNF = Constraint(ConstraintKind.GBNF, 'root ::= "a"')
ALL = (OVERSPILL, *DIALECTS.values())
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": {"type": "integer"}, "strict": True}}


def asking(constraint: Constraint, continuation: str = "") -> InferenceRequest:
    prompt = ChatPrompt((Message("user", "hi"),))
    sampling = SamplingParams(constraint=constraint)
    return InferenceRequest("r", "m", prompt, sampling, Objective(), 5, 0.0, continuation=continuation)


@pytest.mark.parametrize(
    ("dialect", "constraint", "said"),
    [
        *((dialect, SCHEMA, {"response_format": FORMAT}) for dialect in (OVERSPILL, *DIALECTS.values())),
        *(
            (dialect, OBJECT, {"response_format": {"type": "json_object"}})
            for dialect in (OVERSPILL, *DIALECTS.values())
        ),
        *((dialect, REGEX, {"structured_outputs": {"regex": "a+"}}) for dialect in (OVERSPILL, DIALECTS["vllm"])),
        (DIALECTS["vllm"], CHOICE, {"structured_outputs": {"choice": ["a.b", 'c"d']}}),
        (DIALECTS["vllm"], LARK, {"structured_outputs": {"grammar": "start: A"}}),
        (DIALECTS["sglang"], REGEX, {"regex": "a+"}),
        (DIALECTS["sglang"], CHOICE, {"regex": 'a\\.b|c"d'}),
        (DIALECTS["sglang"], GBNF, {"ebnf": 'root ::= "a"'}),
        (DIALECTS["llama.cpp"], CHOICE, {"grammar": 'root ::= "a.b" | "c\\"d"'}),
        (DIALECTS["llama.cpp"], GBNF, {"grammar": 'root ::= "a"'}),
    ],
)
def test_each_server_is_told_in_its_own_words(dialect: Dialect, constraint: Constraint, said: dict[str, Any]) -> None:
    body = json.loads(encode_request(asking(constraint), "m", 100, dialect))
    assert {name: body[name] for name in said} == said
    assert FEATURE_OF[constraint.kind] not in dialect.lacks


def test_what_a_server_lacks_it_is_never_asked_for() -> None:
    assert Feature.REGEX in DIALECTS["llama.cpp"].lacks
    assert Feature.LARK in DIALECTS["sglang"].lacks
    assert {Feature.REGEX, Feature.CHOICE, Feature.GBNF} <= DIALECTS["plain"].lacks
    for dialect in DIALECTS.values():
        assert Feature.CONTINUED_CONSTRAINT in dialect.lacks, "its grammar would begin anew behind the text"
    assert not OVERSPILL.lacks


def test_a_request_says_what_it_needs() -> None:
    assert Feature.REGEX in asking(REGEX).needs()
    assert Feature.CONTINUED_CONSTRAINT not in asking(REGEX).needs()
    assert Feature.CONTINUED_CONSTRAINT in asking(REGEX, "a").needs()
