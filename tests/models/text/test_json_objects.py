"""Objects that name their properties hold these alone, unless the schema says otherwise or might not be met then."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.json_objects import closed
from tests.models.text.test_grammar import GRAMMARS, of_schema, say

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "boolean"}}}
NO_MORE = {"additionalProperties": False}


def kind(*names: str) -> dict[str, Any]:
    """An object that says what it is."""
    said = {"const": names[0]} if len(names) == 1 else {"enum": list(names)}
    return {"type": "object", "properties": {"kind": said}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        (A, {**A, **NO_MORE}),
        ({"properties": {}}, {"properties": {}, **NO_MORE}),
        ({"type": "array", "items": A}, {"type": "array", "items": {**A, **NO_MORE}}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **NO_MORE}, {**B, **NO_MORE}]}),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}},
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {**A, **NO_MORE}}},
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/x"}, kind("y", "z")], "$defs": {"x": kind("x")}, "discriminator": {}},
            {
                "oneOf": [{"$ref": "#/$defs/x"}, {**kind("y", "z"), **NO_MORE}],
                "$defs": {"x": {**kind("x"), **NO_MORE}},
                "discriminator": {},
            },
        ),
        (
            {"properties": {"properties": A, "$ref": B}},
            {"properties": {"properties": {**A, **NO_MORE}, "$ref": {**B, **NO_MORE}}, **NO_MORE},
        ),
    ],
)
def test_objects_hold_what_they_name(schema: Any, held: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == held
    assert json.dumps(schema) == before, "the caller's own is not changed"
    assert closed(held) is held


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x-": {"type": "string"}}},
        {**A, "required": ["a", "c"]},
        {**A, "minProperties": 2},
        {**A, "const": {"a": 1, "c": 2}},
        {"allOf": [A, B]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"$ref": "#/$defs/a", "properties": {"c": {}}, "$defs": {"a": A}},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {"not": A},
        {"properties": {"x": {"not": B}, "y": A}},
        {"if": A, "then": B},
        {"allOf": 3, "properties": 4},
        {"oneOf": [A, B]},
        {"oneOf": [A, {**A, "properties": {**A["properties"], **B["properties"]}}]},
        {"oneOf": [kind("x"), {**kind("y"), "required": []}]},
        {"oneOf": [kind("x", "y"), kind("y", "z")]},
        {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/nowhere"}], "$defs": {"x": kind("x")}},
        {"oneOf": []},
        {"oneOf": {"type": "object"}},
    ],
)
def test_a_schema_that_says_otherwise_or_combines_others_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) is schema


@given(seed=st.integers(0, 10_000), strict=st.booleans())
def test_a_model_without_sense_invents_no_property(seed: int, strict: bool) -> None:
    schema = {
        **A,
        "properties": {
            "a": {"type": "integer", "maximum": 9},
            "b": {"type": "array", "items": {**B, "maxProperties": 1}, "maxItems": 2},
        },
    }
    said = json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=strict)), seed))
    assert {"a"} <= set(said) <= {"a", "b"}
    assert all(set(one) <= {"b"} for one in said.get("b", []))
