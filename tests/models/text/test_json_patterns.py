"""Patterns that cannot be enforced are notes to people where a schema is not strict, and errors by name where it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.text.json_patterns import without_unknown_patterns
from models.text.tools.registry import open_format
from router.base.errors import InvalidRequest
from router.values.constraint import Constraint, ConstraintKind
from router.values.tool_calls import Tool, Tools
from tests.models.text.test_grammar import EOS, GRAMMARS, of_schema

UNKNOWN = [r"^(?!a)\w+$", r"(?<=a)b", r"^(a)\1$", r"^a\b", r"\cA", "["]
FAMILIES = ["hermes", "llama", "mistral"]


def of(pattern: str) -> dict[str, Any]:
    text = {"type": "string", "maxLength": 2}
    properties = {"a": {**text, "pattern": pattern}, "b": {**text, "pattern": "^[0-9]$"}}
    return {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}


def lets_through(constraint: Constraint, text: str) -> bool:
    matcher = GRAMMARS.matcher(constraint)
    return matcher.advance_text(text) and (matcher.complete or matcher.allows(EOS))


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_a_pattern_that_cannot_be_enforced_is_passed_over_alone(pattern: str) -> None:
    loose = of_schema(of(pattern), strict=False)
    assert lets_through(loose, '{"a":"xy","b":"1"}')
    assert not lets_through(loose, '{"a":"xyz","b":"1"}')
    assert not lets_through(loose, '{"a":"xy","b":"x"}')
    with pytest.raises(InvalidRequest, match="`response_format`: this JSON schema cannot be enforced"):
        lets_through(of_schema(of(pattern)), '{"a":"xy","b":"1"}')


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pattern", UNKNOWN)
def test_a_tool_is_held_to_the_rest_of_its_schema(family: str, pattern: str) -> None:
    form = open_format(family)

    def takes(arguments: str, *, strict: bool) -> bool:
        held = Tool("held", "", json.dumps(of(r"^(?!a)\w+$" if strict else "^x")), strict=strict)
        tools = Tools((Tool("look", "", json.dumps(of(pattern)), strict=False), held))
        call = form.words.first + '{"name": "look"' + form.words.name_end + arguments
        return GRAMMARS.matcher(
            Constraint(ConstraintKind.LARK, form.rules(tools, "TEXT", None), param="tools")
        ).advance_text(call)

    assert takes('{"a":"xy","b":"1"}', strict=False)
    assert not takes('{"a":"xyz","b":"1"}', strict=False)
    assert not takes('{"a":"xy","b":"x"}', strict=False)
    with pytest.raises(InvalidRequest, match=r"`tools`: .*look-around"):
        takes('{"a":"xy","b":"1"}', strict=True)


NAMED: list[dict[str, Any]] = [
    {"patternProperties": {r"^(?!a)\w+$": {"type": "integer"}}, "additionalProperties": False},
    {"patternProperties": {r"^(?!a)": {"type": "integer"}, "^s": {"type": "null"}}, "additionalProperties": False},
    {"propertyNames": {"pattern": r"^(?!a)\w+$"}, "additionalProperties": {"type": "integer"}},
]


@pytest.mark.parametrize("named", NAMED)
def test_names_are_free_where_their_pattern_cannot_be_enforced_and_hold_what_they_held(named: dict[str, Any]) -> None:
    schema = {"type": "object", **named}
    loose = of_schema(schema, strict=False)
    assert lets_through(loose, '{"b":1}')
    assert not lets_through(loose, '{"b":"x"}')
    tool = Tools((Tool("look", "", json.dumps(schema)),))
    rules = open_format("hermes").rules(tool, "TEXT", None)
    called = Constraint(ConstraintKind.LARK, rules, param="tools")
    assert GRAMMARS.matcher(called).advance_text('<tool_call>\n{"name": "look", "arguments": {"b":1}')
    assert not GRAMMARS.matcher(called).advance_text('<tool_call>\n{"name": "look", "arguments": {"b":"x"')
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        lets_through(of_schema(schema), '{"b":1}')


def test_names_that_another_keyword_lets_in_stay_free() -> None:
    unknown = {"patternProperties": {"(?!a)": {"type": "integer"}}, "properties": {"b": {"type": "null"}}}
    loose = of_schema({"type": "object", **unknown}, strict=False)
    assert lets_through(loose, '{"b":null,"c":"x"}')
    assert not lets_through(loose, '{"b":1}')


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"patternProperties": {"^a": {"type": "null"}}, "propertyNames": {"pattern": "^a"}},
        {"patternProperties": 3, "propertyNames": {"pattern": 3}},
        of("^[a-z]+$"),
        {"pattern": 3},
        {"properties": {"pattern": {"const": "(?!a)"}}},
        {"const": {"pattern": "["}},
    ],
)
def test_what_has_none_stays(schema: Any) -> None:
    assert without_unknown_patterns(schema) is schema
