"""What a family of models does about tools: how it writes calls, and the grammar that keeps it to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Protocol

from models.text.json_options import in_rules
from router.values.call_reader import CallReader
from router.values.tool_calls import CANONICAL, OPEN, CallDelta, CallStyle, ToolChoice, Tools

MOST_CALLS = 16
TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class CallWords:
    """What stands around the arguments of calls in a family's text.

    Attributes:
        first, following: before a call's function, for the first of an answer and for others.
        name_end: between the name and the arguments.
        call_end: behind the arguments.
        all_end: behind the last call.
    """

    first: str
    following: str
    name_end: str
    call_end: str
    all_end: str = ""


class ToolFormat(Protocol):
    """One family. Registered in `registry`."""

    @property
    def style(self) -> CallStyle:
        """How its text is read."""
        ...

    @property
    def words(self) -> CallWords:
        """How its text is written."""
        ...

    def call_id(self, given: str) -> str:
        """Return a call's id as its template takes it."""
        ...

    def rules(self, tools: Tools, content: str, opener_id: int | None) -> str:
        """Return Lark's rules for an answer, `start` the first of them.

        Args:
            content: the right side of the rule `content`.
            opener_id: the token that opens calls, where it is one of the vocabulary's special tokens.

        Raises:
            InvalidRequest: its calls cannot be told from such an answer.
        """
        ...


def functions(tools: Tools, words: CallWords) -> str:
    """Return the rule `function`: any of the callable tools, with arguments by its schema."""
    names = [f"function_{index}" for index in range(len(tools.callable))]
    lines = ["function: " + " | ".join(names)]
    for name, tool in zip(names, tools.callable, strict=True):
        head = '{"name": ' + json.dumps(tool.name) + words.name_end
        schema = in_rules(json.loads(tool.parameters), strict=tool.strict)
        lines.append(f"{name}: {literal(head)} %json {schema} {literal(words.call_end)}")
    return "\n".join(lines)


def literal(text: str) -> str:
    """Return text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def repeated(rule: str, tools: Tools) -> str:
    """Return how often more calls may follow the first."""
    return f"({rule}){{0,{MOST_CALLS - 1}}}" if tools.parallel else ""


def only_calls(tools: Tools) -> bool:
    """Whether the answer has to call."""
    return bool(tools.named) or tools.choice is ToolChoice.REQUIRED


def written(words: CallWords, pieces: list[str | CallDelta]) -> str:
    """Return an answer, whole or cut anywhere, in a family's own text."""
    text, tail, calls = "", "", 0
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if piece.name:
            text += tail + (words.following if calls else words.first)
            text += '{"name": ' + json.dumps(piece.name) + words.name_end
            tail, calls = words.call_end, calls + 1
        text += piece.arguments
    return text


def written_whole(words: CallWords, content: str, calls: list[tuple[str, str]]) -> str:
    """Return an answer that ended, in a family's own text."""
    pieces: list[str | CallDelta] = [CallDelta(index, name, given) for index, (name, given) in enumerate(calls)]
    text = content + written(words, pieces)
    return text + words.call_end + words.all_end if calls else text


def in_own_words(form: ToolFormat, canonical: str) -> str:
    """Return the beginning of an answer in a family's own text."""
    if form.style == CANONICAL:
        return canonical
    reader = CallReader()
    text = written(form.words, reader.feed(canonical))
    opened = reader.unfinished.startswith(OPEN) and not reader.begun
    if not opened:  # a line break is held back, for an opener might have followed it; what was said is shown
        return canonical if text and not reader.calls and canonical == text + "\n" else text
    return text + (form.words.call_end + form.words.following if reader.calls else form.words.first)
