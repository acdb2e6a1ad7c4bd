"""Names of properties under a schema: `propertyNames`, which llguidance does not know, in keywords that it does.

Pydantic writes a `dict` whose keys are an enum or a pattern so, and zod its records.
"""

from __future__ import annotations

from typing import Any

from models.text.json_schemas import Schema, resolved, rewritten

_SAID_BESIDE = frozenset({"type", "title", "description"})


def with_names_told(schema: Any) -> Any:
    """Return a schema of which `propertyNames` that list names, or are a pattern, are properties of their own.

    The very same object where there are none. Beside `properties` or `patternProperties` they stay as they are.
    """
    return rewritten(schema, lambda part: _told(part, schema))


def _told(schema: Schema, root: Any) -> Schema:
    names = resolved(schema.get("propertyNames"), root)
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return schema
    said = names.keys() - _SAID_BESIDE
    value = schema.get("additionalProperties", True)
    found = {key: part for key, part in schema.items() if key != "propertyNames"}
    listed = [names["const"]] if said == {"const"} else names.get("enum")
    if said in ({"enum"}, {"const"}) and isinstance(listed, list):
        named = {name: value for name in listed if isinstance(name, str)}
        return {**found, "properties": named, "additionalProperties": False}
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return {**found, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return schema
