"""The items that an answer of /v1/responses is made of: thoughts, messages, and calls of functions and custom tools."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.wire.openai.calls import call_id
from router.wire.openai.custom_text import CustomText

Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


@dataclass(slots=True)
class Item:
    """One item, as it grows.

    Attributes:
        names: of the tool that is called; empty for what calls none.
        logprobs: of its tokens so far, as OpenAI's API has them; of messages alone.
    """

    kind: Kind
    names: dict[str, object] = field(default_factory=dict)
    item_id: str = ""
    logprobs: list[object] = field(default_factory=list)
    _called: str = ""
    _text: list[str] = field(default_factory=list)
    _custom: CustomText = field(default_factory=CustomText)

    def __post_init__(self) -> None:
        self.item_id = f"{_PREFIXES[self.kind]}_{secrets.token_hex(16)}"
        self._called = call_id() if self.names else ""

    @property
    def text(self) -> str:
        return "".join(self._text)

    def grow(self, piece: str) -> str:
        """Add what came; return what of it is told now."""
        told = self._custom.feed(piece) if self.kind == "custom_tool_call" else piece
        self._text.append(told)
        return told

    def value(self, status: str) -> dict[str, object]:
        """Return it as it stands in the output."""
        whole: dict[str, object] = {"type": self.kind, "id": self.item_id, "status": status}
        if self.kind == "function_call":
            return whole | {"call_id": self._called, **self.names, "arguments": self.text}
        if self.kind == "custom_tool_call":
            return whole | {"call_id": self._called, **self.names, "input": self.text}
        content = [self.part(self.text, self.logprobs)] if self._text or status != "in_progress" else []
        if self.kind == "reasoning":
            return whole | {"summary": [], "content": content}
        return whole | {"role": "assistant", "content": content}

    def part(self, text: str, logprobs: Sequence[object] = ()) -> dict[str, object] | None:
        """Return the one part of its content; calls have none."""
        if (kind := _PARTS.get(self.kind)) is None:
            return None
        part: dict[str, object] = {"type": kind, "text": text}
        return part | {"annotations": [], "logprobs": [*logprobs]} if self.kind == "message" else part

    def delta(self, piece: str, logprobs: Sequence[object] = ()) -> tuple[str, dict[str, object]]:
        """Return the event that tells a piece, and its fields."""
        return f"{_EVENTS[self.kind]}.delta", {**self._within(logprobs), "delta": piece}

    def done(self) -> tuple[str, dict[str, object]]:
        """Return the event that tells all of it."""
        whole: dict[str, object] = {**self._within(self.logprobs), "text": self.text}
        if self.kind == "function_call":
            whole = {"arguments": self.text, "name": self.names["name"]}
        elif self.kind == "custom_tool_call":
            whole = {"input": self.text}
        return f"{_EVENTS[self.kind]}.done", whole

    def _within(self, logprobs: Sequence[object]) -> dict[str, object]:
        if self.names:
            return {}
        return {"content_index": 0} | ({"logprobs": [*logprobs]} if self.kind == "message" else {})
