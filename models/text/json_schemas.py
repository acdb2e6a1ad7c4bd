"""JSON schemas as trees: which keywords hold schemas, how each is changed or narrowed, and where a reference leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

LEVELS = 64
"""Schemas that nest deeper are compiled by nobody: see `models.text.grammar.MAX_DEPTH`."""
_COMBINING = frozenset({"properties", "$ref", "allOf", "anyOf", "oneOf"})
_APART = frozenset({"not", "if", "dependentSchemas"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SINGLE = frozenset({"items", "additionalProperties", "contains", "not", "if", "then", "else", "additionalItems"})


def rewritten(schema: Any, change: Callable[[Schema], Schema], levels: int = LEVELS) -> Any:
    """Return a schema after `change` has had each one in it, the inner ones first; the same object where none changed.

    Args:
        change: returns what it is given where it has nothing to change, and never alters it.
        levels: how deep it looks.
    """
    if not isinstance(schema, dict) or not levels:
        return schema
    parts = {name: _inside(name, part, change, levels - 1) for name, part in schema.items()}
    found = change(parts)
    same = found is parts and all(parts[name] is part for name, part in schema.items())
    return schema if same else found


def narrowed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return a schema after `change` has narrowed each one in it; the very same object where none changed.

    Where schemas are combined, what one of them does not say another may, and of alternatives that exclude each other
    (`oneOf`) a narrowed one may match what a wider one matches too: such a schema stays as it is, all of it.
    """
    combined: list[Schema] = []

    def look(part: Schema) -> Schema:
        several = isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1
        vague = "oneOf" in part and not _told_apart(part["oneOf"], schema)
        if several or vague or len(_COMBINING & part.keys()) > 1 or _APART & part.keys():
            combined.append(part)
        return part

    rewritten(schema, look)
    return schema if combined else rewritten(schema, change)


def _inside(name: str, part: Any, change: Callable[[Schema], Schema], levels: int) -> Any:
    """Return what stands under a keyword, with the schemas in it changed; what is no schema is not looked at."""
    if name in _SINGLE and isinstance(part, dict):
        return rewritten(part, change, levels)
    if (name in _LISTS or name == "items") and isinstance(part, list):
        new: Any = [rewritten(one, change, levels) for one in part]
        return part if all(a is b for a, b in zip(new, part, strict=True)) else new
    if name in _MAPS and isinstance(part, dict):
        new = {key: rewritten(one, change, levels) for key, one in part.items()}
        return part if all(new[key] is part[key] for key in part) else new
    return part


def resolved(schema: Any, root: Any) -> Any:
    """Follow a reference to a definition of `root`, as pydantic writes them; anything else stays."""
    if not isinstance(schema, dict) or set(schema) != {"$ref"}:
        return schema
    found = root
    for name in str(schema["$ref"]).removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found


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
