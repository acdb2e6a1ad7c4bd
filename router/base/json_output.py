"""What a command prints with `--json`: one value in UTF-8, of which nothing changes what a terminal shows."""

from __future__ import annotations

import json
import sys

from router.base.terminal import ACTS


def as_json(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON for people: other letters as they are, but for those that a terminal obeys.

    Raises:
        TypeError: JSON has no form for it.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)  # which escapes what is below a blank itself
    return ACTS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_json(value: object) -> None:
    """Write `value` to stdout, indented.

    Raises:
        TypeError: JSON has no form for it.
    """
    sys.stdout.write(as_json(value, indent=2) + "\n")
