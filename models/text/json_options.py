"""How JSON is written under a schema, in llguidance's words."""

from __future__ import annotations

from typing import Any

from models.text.json_dates import on_the_calendar
from models.text.json_formats import without_private_formats
from models.text.json_names import with_names_told
from models.text.json_numbers import as_doubles
from models.text.json_objects import closed

STRICT_OPTIONS: dict[str, Any] = {
    # Enough for indented JSON; unbounded, a small model never leaves it.
    "whitespace_pattern": r"[ \n\t\r]{1,32}",
}
LENIENT_OPTIONS = {**STRICT_OPTIONS, "lenient": True, "coerce_one_of": True}


def as_written(schema: Any) -> Any:
    """Return the schema that answers to `schema` are held to; the very same object where it says all of that."""
    return closed(with_names_told(without_private_formats(on_the_calendar(as_doubles(schema)))))
