"""How JSON is written under a schema, in llguidance's words."""

from __future__ import annotations

import json
from typing import Any

from models.text.json_dates import on_the_calendar
from models.text.json_formats import without_private_formats
from models.text.json_ids import without_idle_ids
from models.text.json_names import with_names_told
from models.text.json_numbers import as_doubles, with_whole_counts, within_doubles
from models.text.json_objects import closed
from models.text.json_schemas import Schema

STRICT_OPTIONS: dict[str, Any] = {
    # A space, or a line break and the next line's indentation, by spaces or tabs: given more, small models stay in it.
    "whitespace_pattern": r" |\r?\n( {0,64}|\t{0,16})",
}
LENIENT_OPTIONS = {**STRICT_OPTIONS, "lenient": True, "coerce_one_of": True}
OF_OTHERS: dict[str, Any] = {"whitespace_pattern": r"[ \n\t\r]{1,64}"}
"""Beside one of them: how another server may have written the beginning of an answer."""

_AS_ASKED = (without_idle_ids, with_whole_counts, as_doubles, on_the_calendar, without_private_formats, with_names_told)
_AS_OURS = (within_doubles, closed)


def in_rules(schema: Schema, *, strict: bool) -> str:
    """Return a schema as it stands in Lark's rules, behind `%json`."""
    return json.dumps({**as_written(schema), "x-guidance": STRICT_OPTIONS if strict else LENIENT_OPTIONS})


def as_written(schema: Any, *, by_others: bool = False) -> Any:
    """Return the schema that answers to `schema` are held to; the very same object where it says all of that.

    Args:
        by_others: another server may have begun the answer: it may hold all that `schema` allows.
    """
    for change in _AS_ASKED if by_others else (*_AS_ASKED, *_AS_OURS):
        schema = change(schema)
    return schema
