"""What a command prints with `--json`: one value, indented, in UTF-8."""

from __future__ import annotations

import json
import sys


def print_json(value: object) -> None:
    """Write `value` to stdout.

    Raises:
        TypeError: JSON has no form for it.
    """
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
