"""Calls of tools in replies: the text of an answer into messages and deltas."""

from __future__ import annotations

import secrets
from typing import Any

from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.tool_calls import CallDelta
from router.wire.openai.custom_text import CustomText


class AnswerCalls:
    """Reads one answer.

    Args:
        said: its beginning; told: the reader of this answer was told the calls in it, as a tier below ours was.
        legacy: calls are told as `function_call`.
        customs: tools whose calls are told as text.
    """

    def __init__(
        self, said: str = "", *, told: bool = False, legacy: bool = False, customs: frozenset[str] = frozenset()
    ) -> None:
        self._reader = CallReader.behind(said) if told else CallReader.prefilled(said)
        self._legacy = legacy
        self._customs = customs
        self._texts: dict[int, CustomText] = {}

    def deltas(self, text: str) -> list[dict[str, object]]:
        """Return what further text adds to the message."""
        return [self._delta(piece) for piece in self._reader.feed(text)]

    def end(self, reason: FinishReason) -> tuple[list[dict[str, object]], str]:
        """Return what was held back, and the finish reason as it is told."""
        rest = [self._delta(piece) for piece in self._reader.finish()]
        if reason is FinishReason.STOP and self._reader.calls:
            return rest, "function_call" if self._legacy else "tool_calls"
        return rest, reason.value

    def _delta(self, piece: str | CallDelta) -> dict[str, object]:
        if isinstance(piece, str):
            return {"content": piece}
        if piece.name in self._customs:
            self._texts[piece.index] = CustomText()
        if (text := self._texts.get(piece.index)) is not None:
            custom = {"name": piece.name} if piece.name else {}
            return _call(piece, "custom", {**custom, "input": text.feed(piece.arguments)})
        function = {"name": piece.name} if piece.name else {}
        function["arguments"] = piece.arguments
        if self._legacy:
            return {"function_call": function}
        return _call(piece, "function", function)


def whole_message(text: str, reason: FinishReason, calls: AnswerCalls) -> tuple[dict[str, object], str]:
    """Return the message of an answer that is not streamed, and its finish reason as it is told."""
    deltas = calls.deltas(text)
    rest, told = calls.end(reason)
    content = ""
    called: list[dict[str, object]] = []
    for delta in (*deltas, *rest):
        if "content" in delta:
            content += str(delta["content"])
        else:
            _join(called, delta)
    message: dict[str, object] = {"role": "assistant", "content": content or None, "refusal": None}
    if not called:
        return message | {"content": content}, told
    if "arguments" in called[0]:
        return message | {"function_call": called[0]}, told
    return message | {"tool_calls": called}, told


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _call(piece: CallDelta, kind: str, told: dict[str, str]) -> dict[str, object]:
    """Return a piece of a call; the first one says what it is."""
    head: dict[str, object] = {"id": call_id(), "type": kind} if piece.name else {}
    return {"tool_calls": [{"index": piece.index, **head, kind: told}]}


def _join(called: list[dict[str, object]], delta: dict[str, object]) -> None:
    if "function_call" in delta:
        piece = delta["function_call"]
        whole = called[0] if called else {}
        called[:] = [_joined(whole, piece, "arguments")]  # type: ignore[arg-type]
        return
    pieces: Any = delta["tool_calls"]
    call: dict[str, Any] = pieces[0]
    kind, grows = ("custom", "input") if "custom" in call else ("function", "arguments")
    if "id" in call:
        called.append({"id": call["id"], "type": kind, kind: call[kind]})
    elif called:
        called[-1][kind] = _joined(called[-1][kind], call[kind], grows)  # type: ignore[arg-type]


def _joined(whole: dict[str, str], piece: dict[str, str], grows: str) -> dict[str, object]:
    return {**whole, **piece, grows: whole.get(grows, "") + piece[grows]}
