"""What a schema is called, `$id`, and its dialect, `$schema`: where they lead nowhere they say nothing.

Libraries ask for a name of any kind, such as "Output Format", and some name a dialect that never was.
"""

from __future__ import annotations

import re
from typing import Any

from models.text.json_schemas import Schema, rewritten

_URI = re.compile(r"[\w.~:/?#\[\]@!$&'()*+,;=%-]*", re.ASCII)
_DIALECT = re.compile(r"https?://json-schema\.org/draft(/20\d\d-\d\d|-0[4-7])/schema#?")
_FORMS = (("$id", _URI), ("$schema", _DIALECT))


def without_idle_ids(schema: Any) -> Any:
    """Return a schema without ids that are no URI and dialects that nobody knows; the very same object without them."""
    return rewritten(schema, _told)


def _told(schema: Schema) -> Schema:
    idle = [name for name, form in _FORMS if isinstance(said := schema.get(name), str) and not form.fullmatch(said)]
    return {name: part for name, part in schema.items() if name not in idle} if idle else schema
