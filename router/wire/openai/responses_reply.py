"""Answers → bodies and events of /v1/responses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import orjson

from router.base.errors import OverspillError
from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.tool_calls import CallDelta
from router.values.usage import TokenDetails, Usage
from router.wire.openai.calls import call_id
from router.wire.openai.responses import ResponsesCall


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object of one reply repeats.

    Attributes:
        created_s: Unix time, whole seconds.
        model: the variant that answers.
        call: what was asked.
    """

    request_id: str
    created_s: int
    model: str
    call: ResponsesCall

    def response(
        self, status: str, output: list[dict[str, object]], usage: Usage | None, why: str | None = None
    ) -> dict[str, object]:
        call = self.call
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None if why is None else {"reason": why},
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if call.reasoning is None else call.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if call.temperature is None else call.temperature,
            "text": {"format": {"type": "text"}} if call.text is None else msgspec.to_builtins(call.text),
            "tool_choice": "auto" if call.tool_choice is None else msgspec.to_builtins(call.tool_choice),
            "tools": msgspec.to_builtins(call.tools or []),
            "top_p": 1.0 if call.top_p is None else call.top_p,
            "truncation": call.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": call.user,
            "metadata": call.metadata or {},
        }


def _usage(usage: Usage) -> dict[str, object]:
    """Return it in this API's words, whose clients want the counts that they know even where they are 0."""
    told = usage.details or TokenDetails({}, {})
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cache_write_tokens": 0, **told.prompt, "cached_tokens": cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, **told.completion},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(slots=True)
class _Item:
    """One item of the output: a message, or a call."""

    item_id: str
    name: str = ""
    called: str = ""
    text: list[str] = field(default_factory=list)

    def value(self, status: str) -> dict[str, object]:
        text = "".join(self.text)
        if self.name:
            call = {"call_id": self.called, "name": self.name, "arguments": text}
            return {"type": "function_call", "id": self.item_id, **call, "status": status}
        content = [_part(text)] if text or status != "in_progress" else []
        return {"type": "message", "id": self.item_id, "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEncoder:
    """Encodes one answer, event by event, or as a whole from the same items.

    Args:
        calls: the answer may call tools.
    """

    def __init__(self, head: ResponseHead, *, calls: bool) -> None:
        self._head = head
        self._reader = CallReader() if calls else None
        self._items: list[_Item] = []
        self._sequence = 0
        self._open = False

    def start(self, usage: Usage) -> bytes:  # noqa: ARG002 - told at the end
        """The events before any text."""
        response = self._head.response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes:  # noqa: ARG002
        """The events of further text; log probabilities are not told here."""
        pieces = [text] if self._reader is None else self._reader.feed(text)
        return b"".join(map(self._piece, pieces))

    def reasoning(self, text: str, usage: Usage) -> bytes:  # noqa: ARG002
        """Nothing: what models think is told by /v1/chat/completions; it is counted all the same."""
        return b""

    def finish(self, finish_reason: FinishReason, usage: Usage) -> bytes:
        """The events that close what is open, and the whole response."""
        pieces = [] if self._reader is None else self._reader.finish()
        rest = b"".join(map(self._piece, pieces))
        cut = finish_reason is FinishReason.LENGTH
        if not self._items:
            rest += self._begin(_Item(_id("msg")))
        rest += self._close("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        return rest + self._event(f"response.{status}", response=self._whole(status, usage))

    def failed(self, error: OverspillError, usage: Usage) -> bytes:  # noqa: ARG002 - there is one answer, told at the end
        """The event that ends an answer which cannot go on."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def close(self, usage: Usage) -> bytes:  # noqa: ARG002 - the whole response has told it
        """Nothing follows the whole response."""
        return b""

    def body(self, text: str, finish_reason: FinishReason, usage: Usage) -> bytes:
        """The body of a reply that is not streamed."""
        self.text(text, usage)
        self.finish(finish_reason, usage)
        return orjson.dumps(self._whole("incomplete" if finish_reason is FinishReason.LENGTH else "completed", usage))

    def _whole(self, status: str, usage: Usage) -> dict[str, object]:
        last = len(self._items) - 1
        output = [item.value(status if index == last else "completed") for index, item in enumerate(self._items)]
        why = "max_output_tokens" if status == "incomplete" else None
        return self._head.response(status, output, usage, why)

    def _piece(self, piece: str | CallDelta) -> bytes:
        if isinstance(piece, str):
            begun = b"" if self._open and not self._items[-1].name else self._begin(_Item(_id("msg")))
            self._items[-1].text.append(piece)
            delta = self._about("response.output_text.delta", content_index=0, delta=piece, logprobs=[])
            return begun + delta
        begun = self._begin(_Item(_id("fc"), piece.name, call_id())) if piece.name else b""
        if not piece.arguments:
            return begun
        self._items[-1].text.append(piece.arguments)
        return begun + self._about("response.function_call_arguments.delta", delta=piece.arguments)

    def _begin(self, item: _Item) -> bytes:
        closed = self._close("completed")
        self._items.append(item)
        self._open = True
        place = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=place, item=item.value("in_progress"))
        if not item.name:
            added += self._about("response.content_part.added", content_index=0, part=_part(""))
        return closed + added

    def _close(self, status: str) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item, text = self._items[-1], "".join(self._items[-1].text)
        if item.name:
            done = self._about("response.function_call_arguments.done", arguments=text, name=item.name)
        else:
            done = self._about("response.output_text.done", content_index=0, text=text, logprobs=[])
            done += self._about("response.content_part.done", content_index=0, part=_part(text))
        place = len(self._items) - 1
        return done + self._event("response.output_item.done", output_index=place, item=item.value(status))

    def _about(self, kind: str, **fields: object) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1].item_id, output_index=place, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
