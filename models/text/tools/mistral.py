"""Mistral: `[TOOL_CALLS]`, a special token, before a list of objects."""

from __future__ import annotations

import hashlib

from models.text.tools.format import TEXT, CallWords, functions, literal, only_calls, repeated
from router.values.tool_calls import CallStyle, Tools

_OPEN = "[TOOL_CALLS]"
_ID_CHARS = 9  # its templates take no others


class Mistral:
    """`models.text.tools.format.ToolFormat`."""

    style = CallStyle(opener=_OPEN, closer="")
    words = CallWords(f"{_OPEN}[", ", ", ', "arguments": ', "}", "]")

    def call_id(self, given: str) -> str:
        if len(given) == _ID_CHARS and given.isalnum():
            return given
        return hashlib.sha256(given.encode()).hexdigest()[:_ID_CHARS]

    def rules(self, tools: Tools, content: str, opener_id: int | None) -> str:
        more = repeated(f"{literal(self.words.following)} function", tools)
        lines = [f"calls: {literal('[')} function {more} {literal(']')}", functions(tools, self.words)]
        opener = literal(_OPEN) if opener_id is None else f"<[{opener_id}]>"
        if only_calls(tools):
            return "\n".join([f"start: {opener} calls", *lines])
        if content != "TEXT":
            return "\n".join([f"start: content | {opener} calls", f"content: {content}", *lines])
        if opener_id is not None:
            return "\n".join([f"start: TEXT | TEXT? {opener} calls", TEXT, *lines])
        opened = r"opened[lazy]: /(.|\n)*\[TOOL_CALLS\]/"
        return "\n".join(["start: TEXT | opened calls", opened, TEXT, *lines])


FORMAT = Mistral()
