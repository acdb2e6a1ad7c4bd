"""Objects under a schema: those that name their properties, and say nothing of others, hold no others.

By the letter of JSON Schema they may hold any. A small model that may invent properties does so until its answer is
cut; xgrammar, which vLLM takes by default, lets none through either.
"""

from __future__ import annotations

from typing import Any

from models.text.json_schemas import Schema, narrowed

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

    Whatever matches it matches `schema`.
    """
    return narrowed(schema, _closed)


def _closed(schema: Schema) -> Schema:
    named = schema.get("properties")
    if not isinstance(named, dict) or _SAID & schema.keys():
        return schema
    required = schema.get("required")
    if isinstance(required, list) and not all(isinstance(name, str) and name in named for name in required):
        return schema
    return {**schema, "additionalProperties": False}
