"""Calls of tools in replies: the text of an answer into messages and deltas."""

from __future__ import annotations

import secrets
from typing import Any

from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.tool_calls import CallDelta


class AnswerCalls:
    """Reads one answer.

    Args:
        said: text of it that was told before.
        legacy: calls are told as `function_call`.
    """

    def __init__(self, said: str = "", *, legacy: bool = False) -> None:
        self._reader = CallReader.behind(said)
        self._legacy = legacy

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
        function = {"name": piece.name} if piece.name else {}
        function["arguments"] = piece.arguments
        if self._legacy:
            return {"function_call": function}
        call: dict[str, object] = {"index": piece.index}
        if piece.name:
            call |= {"id": call_id(), "type": "function"}
        return {"tool_calls": [{**call, "function": function}]}


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


def _join(called: list[dict[str, object]], delta: dict[str, object]) -> None:
    if "function_call" in delta:
        piece = delta["function_call"]
        whole = called[0] if called else {}
        called[:] = [_joined(whole, piece)]  # type: ignore[arg-type]
        return
    pieces: Any = delta["tool_calls"]
    call: dict[str, Any] = pieces[0]
    if "id" in call:
        called.append({"id": call["id"], "type": "function", "function": call["function"]})
    elif called:
        called[-1]["function"] = _joined(called[-1]["function"], call["function"])  # type: ignore[arg-type]


def _joined(whole: dict[str, str], piece: dict[str, str]) -> dict[str, object]:
    return {**whole, **piece, "arguments": whole.get("arguments", "") + piece["arguments"]}
