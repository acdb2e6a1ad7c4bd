"""JSON schemas as trees: which keywords hold schemas, how each is changed, and what a reference leads to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

LEVELS = 64
"""Schemas that nest deeper are compiled by nobody: see `models.text.grammar.MAX_DEPTH`."""
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
