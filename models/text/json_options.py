"""How JSON is written under a schema, in llguidance's words."""

from __future__ import annotations

from typing import Any

STRICT_OPTIONS: dict[str, Any] = {
    # Enough for indented JSON; unbounded, a small model never leaves it.
    "whitespace_pattern": r"[ \n\t\r]{1,32}",
}
LENIENT_OPTIONS = {**STRICT_OPTIONS, "lenient": True, "coerce_one_of": True}
