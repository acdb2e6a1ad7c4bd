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
    return _with_known_names(_with_known_pattern(schema))


def _with_known_pattern(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or _is_known(pattern):
        return schema
    return {name: part for name, part in schema.items() if name != "pattern"}


def _with_known_names(schema: Schema) -> Schema:
    """Return a schema whose properties are named freely where the pattern of their names is unknown."""
    names, patterns = schema.get("propertyNames"), schema.get("patternProperties")
    if isinstance(names, dict) and (known := _with_known_pattern(names)) is not names:
        schema = {**schema, "propertyNames": known}
    if not isinstance(patterns, dict) or not (unknown := [each for each in patterns if not _is_known(each)]):
        return schema
    known = {each: part for each, part in patterns.items() if each not in unknown}
    others = schema.get("additionalProperties", True)
    values = [patterns[each] for each in unknown] + ([] if others is False else [others])
    found = {name: part for name, part in schema.items() if name != "patternProperties"}
    found |= {"patternProperties": known} if known else {}
    return found | {"additionalProperties": True if others is True else _any_of(values)}


def _any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _is_known(pattern: str) -> bool:
    from llguidance import LLMatcher  # noqa: PLC0415 (see `models.text.grammar`)

    alone = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(alone)
