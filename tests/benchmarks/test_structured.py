"""The random schemas and expressions of `benchmarks/structured.py` are such as it says, and its check can fail."""

from __future__ import annotations

import json
import re

import jsonschema

from benchmarks._random_constraints import Regexes, Schemas, invalid
from router.values.constraint import Constraint, ConstraintKind


def test_what_is_drawn_is_legal_and_the_same_every_time() -> None:
    schemas, patterns = Schemas(1), Regexes(2)
    drawn = [schemas.next() for _ in range(100)]
    for schema in drawn:
        jsonschema.Draft202012Validator.check_schema(schema)
    for _ in range(100):
        re.compile(patterns.next())
    again = Schemas(1)
    assert drawn == [again.next() for _ in range(100)]


def test_an_answer_that_does_not_match_is_found_out() -> None:
    schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", "required": ["a"]}))
    assert invalid(schema, '{"a": 1}') is None
    assert invalid(schema, '{"b": 1}')
    assert invalid(schema, '{"a": 1')
    day = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "string", "format": "date"}))
    assert invalid(day, '"2026-13-01"')
    digits = Constraint(ConstraintKind.REGEX, r"\d+")
    assert invalid(digits, "12") is None
    assert invalid(digits, "12a")
