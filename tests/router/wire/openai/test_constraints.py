"""What an answer has to match, as each API says it; and what is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.base.errors import InvalidRequest
from router.values.constraint import ANY_OBJECT, Constraint, ConstraintKind
from router.wire.openai.chat import decode_chat
from router.wire.openai.completion import decode_completion

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'


def chat(**fields: Any) -> Constraint | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_chat(orjson.dumps(body)).sampling.constraint


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, **fields}}


def test_openai_says_it_by_response_format() -> None:
    at = "response_format.json_schema.schema"
    assert chat(response_format={"type": "text"}) is None
    assert chat(response_format={"type": "json_object"}) == Constraint(
        ConstraintKind.JSON_SCHEMA, ANY_OBJECT, strict=False
    )
    assert chat(response_format=named(strict=True)) == Constraint(
        ConstraintKind.JSON_SCHEMA, TEXT, strict=True, param=at, name="person"
    )
    lenient = chat(response_format=named())
    assert lenient is not None
    assert not lenient.strict


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, ConstraintKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, ConstraintKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, ConstraintKind.REGEX, "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            ConstraintKind.CHOICE,
            '["a","b"]',
            "structured_outputs.choice",
        ),
        ({"guided_json": SCHEMA}, ConstraintKind.JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_regex": "a+"}, ConstraintKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, ConstraintKind.CHOICE, '["a"]', "guided_choice"),
        ({"guided_grammar": "start: A"}, ConstraintKind.LARK, "start: A", "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, ConstraintKind.GBNF, 'root ::= "a"', "guided_grammar"),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+", "regex"),
        ({"ebnf": 'root ::= "a"'}, ConstraintKind.GBNF, 'root ::= "a"', "ebnf"),
        ({"grammar": 'root ::= "a"'}, ConstraintKind.GBNF, 'root ::= "a"', "grammar"),
        ({"json_schema": SCHEMA}, ConstraintKind.JSON_SCHEMA, TEXT, "json_schema"),
        ({"json_schema": TEXT, "grammar": ""}, ConstraintKind.JSON_SCHEMA, TEXT, "json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            ConstraintKind.JSON_SCHEMA,
            TEXT,
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            ConstraintKind.JSON_SCHEMA,
            TEXT,
            "response_format.schema",
        ),
    ],
)
def test_other_servers_say_it_by_their_own_fields(
    fields: dict[str, Any], kind: ConstraintKind, source: str, param: str
) -> None:
    found = chat(**fields)
    assert found is not None
    assert (found.kind, found.source, found.param) == (kind, source, param)
    completion = decode_completion(orjson.dumps({"model": "m", "prompt": "hi", **fields}))
    assert completion.sampling.constraint == found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": named(schema=3)}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "regex": "b"}, "regex"),
        ({"guided_regex": "a", "regex": "a", "ebnf": "a"}, "ebnf"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        # guidance sends both, for older vLLMs and for newer ones, which pass over each other's
        (
            {"structured_outputs": {"grammar": "start: /a/"}, "guided_grammar": "start: /a/"},
            "structured_outputs.grammar",
        ),
        ({"guided_regex": "a", "regex": "a"}, "guided_regex"),
        ({"response_format": named(), "guided_json": SCHEMA}, "guided_json"),
        ({"response_format": named(), "json_schema": TEXT}, "json_schema"),
    ],
)
def test_one_constraint_in_the_words_of_several_servers_is_one(fields: dict[str, Any], param: str) -> None:
    found = chat(**fields)
    assert found is not None
    assert (found.param, found.strict) == (param, True), "the strictest of them"
