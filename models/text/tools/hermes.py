"""Hermes and Qwen: `<tool_call>` around an object. Also what models are asked for whose templates know no tools."""

from __future__ import annotations

from models.text.tools.format import TEXT, CallWords, functions, literal, only_calls, repeated
from router.values.tool_calls import CANONICAL, CLOSE, OPEN, CallStyle, Tools


class Hermes:
    """`models.text.tools.format.ToolFormat`. Its text is the form between the stages."""

    style: CallStyle = CANONICAL
    words = CallWords(f"{OPEN}\n", f"\n{OPEN}\n", ', "arguments": ', f"}}\n{CLOSE}")

    def call_id(self, given: str) -> str:
        return given

    def rules(self, tools: Tools, content: str, opener_id: int | None) -> str:
        first, following = literal(self.words.first), literal(self.words.following)
        lines = [functions(tools, self.words)]
        if opener_id is not None:  # models write the token, and text that is continued may spell it
            line = literal("\n")
            first, following = f"opener {line}", f"{line} opener {line}"
            lines.append(f"opener: <[{opener_id}]> | {literal(OPEN)}")
        more = repeated(f"{following} function", tools)
        call = f"{first} function {more}"
        if only_calls(tools):
            return "\n".join([f"start: {call}", *lines])
        if content != "TEXT":
            return "\n".join([f"start: content | {call}", f"content: {content}", *lines])
        if opener_id is not None:
            call = f"TEXT? <[{opener_id}]> {literal(chr(10))} function {more}"
            return "\n".join([f"start: TEXT | {call}", TEXT, *lines])
        opened = f"opened[lazy]: /(.|\\n)*{OPEN}/"
        return "\n".join([f"start: TEXT | opened {literal(chr(10))} function {more}", opened, TEXT, *lines])


FORMAT = Hermes()
