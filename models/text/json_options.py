"""How JSON is written under a schema, in llguidance's words."""

from __future__ import annotations

from typing import Any

from models.text.json_dates import on_the_calendar
from models.text.json_formats import without_private_formats
from models.text.json_names import with_names_told
from models.text.json_numbers import as_doubles, within_doubles
from models.text.json_objects import closed

STRICT_OPTIONS: dict[str, Any] = {
    # A space, or a line break and the next line's indentation, by spaces or tabs: given more, small models stay in it.
    "whitespace_pattern": r" |\r?\n( {0,64}|\t{0,16})",
}
LENIENT_OPTIONS = {**STRICT_OPTIONS, "lenient": True, "coerce_one_of": True}


def as_written(schema: Any) -> Any:
    """Return the schema that answers to `schema` are held to; the very same object where it says all of that."""
    for change in (as_doubles, within_doubles, on_the_calendar, without_private_formats, with_names_told, closed):
        schema = change(schema)
    return schema
