"""Custom tools, which are called with text: as functions, which models are shown, and that text out of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from router.base.errors import InvalidRequest

TEXT = "input"
"""The argument that the text is."""
TEXT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {TEXT: {"type": "string"}},
    "required": [TEXT],
    "additionalProperties": False,
}

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_ANY_BEGIN = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
# Whole characters of a JSON string: half an escape, and the first of two that may be a pair, wait for the rest.
_WHOLE = re.compile(
    r'(?:[^"\\]'
    r"|\\[^u]"
    r"|\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7c-fC-F][0-9a-fA-F]{2})"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}"
    r"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\(?:[^u]|u(?:[0-9a-cefA-CEF]|[dD][0-9abAB])))))*"
)


def arguments_of_text(text: str) -> str:
    """Return the arguments of a call that holds text."""
    return orjson.dumps({TEXT: text}).decode()


def refuse_grammar(wanted: Mapping[str, Any] | None, at: str) -> None:
    """Check the `format` of a custom tool.

    Raises:
        InvalidRequest: it is not free text.
    """
    if wanted is not None and wanted.get("type") != "text":
        raise InvalidRequest(
            f'`{at}`: the text of a custom tool is not held to a grammar here: send {{"type": "text"}}', param=at
        )


class CustomText:
    """Reads the text of one call, as it comes.

    Arguments of another form, of a server that keeps to no schema, are its text as they stand.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = self._odd = self._done = False

    def feed(self, arguments: str) -> str:
        """Return what further arguments add to the text."""
        if self._done:
            return ""
        self._held += arguments
        if not (self._inside or self._odd):
            self._begin()
        if self._odd:
            return self._take(len(self._held))
        if not self._inside:
            return ""
        whole = _WHOLE.match(self._held)
        text = self._take(whole.end() if whole else 0)
        self._done = self._held.startswith('"')
        return _unescaped(text)

    def _begin(self) -> None:
        if begun := _BEGIN.match(self._held):
            self._inside = True
            self._take(begun.end())
        else:
            self._odd = not _ANY_BEGIN.fullmatch(self._held)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def _unescaped(text: str) -> str:
    try:
        said = str(json.loads(f'"{text}"', strict=False))
    except ValueError:  # an escape that JSON does not have
        return text
    return said.encode(errors="replace").decode()  # half a pair of surrogates is no text
