"""Formats under a schema that llguidance does not know: versions of UUIDs are written out, private names say nothing.

JSON Schema takes a format that it does not define for a note to people: `password` and `int32` of OpenAPI, `ulid` and
`starts_with` of zod, `path` of Pydantic. Those that it defines stay, also where nobody here can enforce them.
"""

from __future__ import annotations

import re
from typing import Any

from models.text.json_schemas import Schema, rewritten

_DEFINED = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
        "uuid",
    ]
)
"""Section 7.3 of JSON Schema 2020-12, Validation."""
_UUID_VERSION = re.compile("uuid([1-8])")
_HEX = "[0-9a-fA-F]"


def without_private_formats(schema: Any) -> Any:
    """Return a schema whose formats are those of JSON Schema; the very same object where they all were."""
    return rewritten(schema, _defined)


def _defined(schema: Schema) -> Schema:
    name = schema.get("format")
    if not isinstance(name, str) or name in _DEFINED:
        return schema
    found = {key: part for key, part in schema.items() if key != "format"}
    version = _UUID_VERSION.fullmatch(name)
    if version is None or "pattern" in schema or "const" in schema or "enum" in schema:
        return found
    digits = f"{_HEX}{{8}}-{_HEX}{{4}}-{version[1]}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
    return {**found, "pattern": f"^{digits}$"}
