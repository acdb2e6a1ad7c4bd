"""Dates under a schema: `"format": "date"` and `"date-time"` written out, so that every one is a day of the calendar.

llguidance takes a date for digits in the right places; readers such as Python's know no year 0 and no 29th of February
in 2023. Days are those of RFC 3339, section 5.7; the time of day is as in its section 5.6, without leap seconds.
"""

from __future__ import annotations

from typing import Any

from models.text.json_schemas import Schema, rewritten

_FOURTH = "0[48]|[2468][048]|[13579][26]"
_YEAR = "[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000"
_DAY = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"(({_YEAR})-({_DAY})|([0-9]{{2}}({_FOURTH})|({_FOURTH})00)-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": f"^{DATE}$", "date-time": f"^{DATE}T{_TIME}$"}


def on_the_calendar(schema: Any) -> Any:
    """Return a schema whose dates are days that there are; the very same object where it has no dates."""
    return rewritten(schema, _written_out)


def _written_out(schema: Schema) -> Schema:
    pattern = _PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is None or "pattern" in schema or "const" in schema or "enum" in schema:
        return schema
    return {**{name: part for name, part in schema.items() if name != "format"}, "pattern": pattern}
