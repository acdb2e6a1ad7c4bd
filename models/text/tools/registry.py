"""Formats by name, and which of them a chat template writes. Each is imported when it is used.

| name | families | marked by |
|---|---|---|
| `hermes` | Hermes, Qwen2.5, Qwen3 | `<tool_call>` in the template |
| `llama` | Llama 3.1 and later | its tag for Python, or the role `ipython` |
| `mistral` | Mistral, Mixtral | `[TOOL_CALLS]` |
"""

from __future__ import annotations

import importlib

from models.text.tools.format import ToolFormat

_FORMATS = {
    "hermes": "models.text.tools.hermes",
    "llama": "models.text.tools.llama",
    "mistral": "models.text.tools.mistral",
}
_MARKS = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama"), ("ipython", "llama"))


def format_of(template: str) -> str | None:
    """Return the format that a chat template writes; None if it knows no tools, or writes them as none here does."""
    if "tools" not in template:
        return None
    return next((name for mark, name in _MARKS if mark in template), None)


def open_format(name: str) -> ToolFormat:
    """Return a format by its name."""
    found: ToolFormat = importlib.import_module(_FORMATS[name]).FORMAT
    return found
