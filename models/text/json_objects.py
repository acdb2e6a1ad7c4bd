"""Objects under a schema: those that name their properties, and say nothing of others, hold no others.

By the letter of JSON Schema they may hold any. A small model that may invent properties does so until its answer is
cut; xgrammar, which vLLM takes by default, lets none through either.
"""

from __future__ import annotations

from typing import Any

from models.text.json_schemas import Schema, resolved, rewritten

_COMBINING = frozenset({"properties", "$ref", "allOf", "anyOf", "oneOf"})
_APART = frozenset({"not", "if", "dependentSchemas"})
_SAID = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "propertyNames",
        "minProperties",
        "dependencies",
        "dependentRequired",
        "enum",
        "const",
        "$dynamicRef",
        "$recursiveRef",
    }
)
"""Beside these, what is not named is not left out by accident, or may have to be there."""


def closed(schema: Any) -> Any:
    """Return a schema whose objects hold what it names alone; the very same object where that changes nothing.

    Whatever matches it matches `schema`. Where schemas are combined, what one of them does not name another may, and of
    alternatives that exclude each other (`oneOf`) a closed one may match what an open one matches too: such a schema
    stays as it is, all of it.
    """
    combined: list[Schema] = []

    def look(part: Schema) -> Schema:
        several = isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1
        vague = "oneOf" in part and not _told_apart(part["oneOf"], schema)
        if several or vague or len(_COMBINING & part.keys()) > 1 or _APART & part.keys():
            combined.append(part)
        return part

    rewritten(schema, look)
    return schema if combined else rewritten(schema, _closed)


def _closed(schema: Schema) -> Schema:
    named = schema.get("properties")
    if not isinstance(named, dict) or _SAID & schema.keys():
        return schema
    required = schema.get("required")
    if isinstance(required, list) and not all(isinstance(name, str) and name in named for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _told_apart(alternatives: Any, root: Any) -> bool:
    """Whether objects are told apart by a property that each alternative requires, with values of its own."""
    if not isinstance(alternatives, list):
        return False
    values = [_required_values(resolved(one, root)) for one in alternatives]
    shared = set.intersection(*(set(one) for one in values)) if values else set()
    return any(
        sum(len(one[name]) for one in values) == len({v for one in values for v in one[name]}) for name in shared
    )


def _required_values(schema: Any) -> dict[str, set[str]]:
    """Return the texts that each required property of an object may have, of those that have only a few."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, dict) or not isinstance(required, list):
        return {}
    found = {}
    for name in required:
        part = named.get(name) if isinstance(name, str) else None
        allowed = ([part["const"]] if "const" in part else part.get("enum")) if isinstance(part, dict) else None
        if isinstance(allowed, list) and allowed and all(isinstance(value, str) for value in allowed):
            found[name] = set(allowed)
    return found
