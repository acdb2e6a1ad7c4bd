"""A schema may have a name of any kind, and a dialect that nobody knows: it is enforced all the same."""

from __future__ import annotations

from typing import Any

import pytest

from models.text.json_ids import without_idle_ids
from tests.models.text.test_grammar import GRAMMARS, of_schema

DRAFT = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "named",
    [
        {"$id": "Output Format"},
        {"$id": "Ausgabe-Größe"},
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": "a dialect of mine"},
        {"$id": "T", "$schema": DRAFT},
        {"$id": "https://example.com/t", "$schema": "http://json-schema.org/draft-07/schema"},
    ],
)
def test_a_schema_is_enforced_whatever_it_is_called(named: dict[str, str], strict: bool) -> None:
    inner = {"$id": "a part", "type": "integer"}
    whole = {**named, "type": "object", "properties": {"a": inner, "$id": {"type": "null"}}, "required": ["a"]}
    assert GRAMMARS.matcher(of_schema(whole, strict=strict)).advance_text('{"a":1,"$id":null}')
    assert not GRAMMARS.matcher(of_schema(whole, strict=strict)).advance_text('{"a":"x"')


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"$id": "T", "$schema": DRAFT, "$defs": {"U": {"$id": "U"}}, "properties": {"a": {"$ref": "U"}}},
        {"$id": 3, "$schema": None},
        {"properties": {"$id": {"const": "a b"}}},
        {"const": {"$id": "a b"}},
    ],
)
def test_what_says_something_stays(schema: Any) -> None:
    assert without_idle_ids(schema) is schema
