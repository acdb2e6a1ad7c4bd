"""What may be told of a configuration: everything but its secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_SECRET = re.compile(r"(^|_)(api_keys?|password|token|secret|database)$")


def tellable(config: object) -> dict[str, Any]:
    """Return a configuration as plain JSON values with every secret blacked out: what `reported` may carry."""
    tree = msgspec.to_builtins(config)
    return _without_secrets(tree) if isinstance(tree, Mapping) else {}


def _without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            shown[key] = _without_secrets(value)
        elif value and _SECRET.search(key):
            shown[key] = "***"
        else:
            shown[key] = value
    return shown
