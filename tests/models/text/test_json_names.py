"""Objects whose names follow a list or a pattern hold no others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.json_names import with_names_told
from tests.models.text.test_grammar import GRAMMARS, of_schema, say

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
LISTED = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER}
PATTERN = {
    "type": "object",
    "propertyNames": {"type": "string", "pattern": "^k[0-9]$"},
    "additionalProperties": NUMBER,
    "maxProperties": 3,
}
BY_REFERENCE = {
    "$defs": {"Side": {"enum": ["left", "right"], "title": "Side", "type": "string"}},
    "type": "object",
    "properties": {
        "sides": {"type": "object", "propertyNames": {"$ref": "#/$defs/Side"}, "additionalProperties": NUMBER}
    },
    "required": ["sides"],
}


@given(seed=st.integers(0, 10_000), strict=st.booleans())
def test_a_model_without_sense_names_what_is_listed(seed: int, strict: bool) -> None:
    said = json.loads(say(GRAMMARS.matcher(of_schema(LISTED, strict=strict)), seed))
    assert said.keys() <= {"a", "b"}
    sides = json.loads(say(GRAMMARS.matcher(of_schema(BY_REFERENCE, strict=strict)), seed))["sides"]
    assert sides.keys() <= {"left", "right"}
    assert all(0 <= value <= 99 for value in sides.values())


@given(seed=st.integers(0, 10_000), strict=st.booleans())
def test_a_model_without_sense_names_by_a_pattern(seed: int, strict: bool) -> None:
    said = json.loads(say(GRAMMARS.matcher(of_schema(PATTERN, strict=strict)), seed))
    assert all(re.fullmatch("k[0-9]", name) for name in said)


def test_names_that_are_required_are_there() -> None:
    schema = {**LISTED, "required": ["a", "b"]}
    assert json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=True)), seed=1)).keys() == {"a", "b"}


def test_the_callers_own_is_not_changed() -> None:
    before = json.dumps(LISTED)
    told = with_names_told(LISTED)
    assert told["properties"] == {"a": NUMBER, "b": NUMBER}
    assert json.dumps(LISTED) == before
    assert with_names_told(told) is told


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"properties": {"propertyNames": {"enum": ["a"]}}},
        {**LISTED, "properties": {"a": True}},
        {**LISTED, "patternProperties": {"^a": True}},
        {"propertyNames": {"minLength": 2}},
        {"propertyNames": {"pattern": "^a", "minLength": 2}},
        {"propertyNames": {"pattern": ["^a"]}},
        {"propertyNames": {"enum": "a"}},
        {"propertyNames": {"$ref": "#/$defs/none"}},
    ],
)
def test_what_says_more_or_nothing_stays(schema: Any) -> None:
    assert with_names_told(schema) is schema
