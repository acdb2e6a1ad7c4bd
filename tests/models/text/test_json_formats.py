"""Formats that JSON Schema does not define are notes to people, but for versions of UUIDs."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.json_formats import without_private_formats
from router.base.errors import InvalidRequest
from tests.models.text.test_grammar import GRAMMARS, of_schema, say


@pytest.mark.parametrize("name", ["password", "path", "binary", "byte", "ulid", "starts_with", "int32", ""])
@pytest.mark.parametrize("strict", [True, False])
def test_a_private_format_says_nothing(name: str, strict: bool) -> None:
    schema = {"type": "string", "format": name, "maxLength": 4}
    assert without_private_formats(schema) == {"type": "string", "maxLength": 4}
    said = json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=strict)), seed=1))
    assert isinstance(said, str)
    assert len(said) <= 4


@given(seed=st.integers(0, 10_000), version=st.integers(1, 8), strict=st.booleans())
def test_a_version_of_a_uuid_is_kept(seed: int, version: int, strict: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "string", "format": f"uuid{version}"}},
        "required": ["id"],
    }
    said = json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=strict)), seed))
    assert uuid.UUID(said["id"]).version == version


@pytest.mark.parametrize("name", ["uri-reference", "regex", "idn-email"])
def test_a_defined_one_that_nobody_enforces_is_refused_where_that_was_asked(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"Unknown format: {name}"):
        GRAMMARS.matcher(of_schema({"type": "string", "format": name}, strict=True))


@pytest.mark.parametrize(
    "schema",
    [True, {"type": "string", "format": "uuid"}, {"format": 3}, {"properties": {"format": {"const": "ulid"}}}],
)
def test_what_has_no_private_format_stays(schema: Any) -> None:
    assert without_private_formats(schema) is schema
