"""Patterns under a schema that llguidance cannot enforce, such as look-around: notes to people, unless it is strict."""

from __future__ import annotations

import json
import re
from typing import Any

from models.text.json_schemas import Schema, rewritten

_SCHEMA_IN_LARK = re.compile(r"%json (?=\{)")


def without_unknown_patterns(schema: Any) -> Any:
    """Return a schema whose patterns can all be enforced; the very same object where they all could."""
    return rewritten(schema, _known)


def in_lark(rules: str) -> str:
    """Return rules whose schemas, but the strict ones, are without these patterns."""
    found, end, decoder = "", 0, json.JSONDecoder()
    for mark in _SCHEMA_IN_LARK.finditer(rules):
        if mark.end() < end:  # inside of a schema
            continue
        try:
            schema, after = decoder.raw_decode(rules, mark.end())
        except ValueError:
            continue
        told = schema.get("x-guidance")
        if isinstance(told, dict) and told.get("lenient"):
            found += rules[end : mark.end()] + json.dumps(without_unknown_patterns(schema))
            end = after
    return found + rules[end:]


def _known(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or _is_known(pattern):
        return schema
    return {name: part for name, part in schema.items() if name != "pattern"}


def _is_known(pattern: str) -> bool:
    from llguidance import LLMatcher  # noqa: PLC0415 (see `models.text.grammar`)

    alone = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(alone)
