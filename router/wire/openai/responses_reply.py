"""Answers → bodies and events of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import orjson

from router.base.errors import OverspillError
from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.tool_calls import CallDelta
from router.values.usage import TokenDetails, Usage
from router.wire.openai.responses import ResponsesCall
from router.wire.openai.responses_items import Item, Kind
from router.wire.openai.responses_tools import CallNames


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
        self,
        status: str,
        output: list[dict[str, object]],
        usage: Usage | None,
        *,
        why: str | None = None,
        error: OverspillError | None = None,
    ) -> dict[str, object]:
        call = self.call
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": None if error is None else {"code": error.code, "message": error.message},
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
            "tools": [tool.told() for tool in call.tools or [] if not tool.optional],
            "top_logprobs": call.top_logprobs or 0,
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


class ResponseEncoder:
    """Encodes one answer, event by event, or as a whole from the same items.

    Args:
        calls: the answer may call tools.
    """

    def __init__(self, head: ResponseHead, *, calls: bool) -> None:
        self._head = head
        self._reader = CallReader() if calls else None
        self._names = CallNames(head.call.tools or [])
        self._items: list[Item] = []
        self._untold: list[object] = []
        self._sequence = 0
        self._open = False

    def start(self, usage: Usage) -> bytes:  # noqa: ARG002 - told at the end
        """The events before any text."""
        response = self._head.response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes:  # noqa: ARG002
        """The events of further text; log probabilities go with what is shown of it, those of calls are not told."""
        self._untold += _entries(logprobs)
        pieces = ([text] if text else []) if self._reader is None else self._reader.feed(text)
        return b"".join(map(self._piece, pieces))

    def reasoning(self, text: str, usage: Usage) -> bytes:  # noqa: ARG002
        """The events of further thoughts, which are an item of their own before the answer."""
        return self._within("reasoning") + self._grown(text)

    def finish(self, finish_reason: FinishReason, usage: Usage, stop: str | None = None) -> bytes:  # noqa: ARG002
        """The events that close what is open, and the whole response."""
        pieces = [] if self._reader is None else self._reader.finish()
        rest = b"".join(map(self._piece, pieces))
        cut = finish_reason is FinishReason.LENGTH
        if not self._items:
            rest += self._begin(Item("message"))
        if self._items[-1].kind == "message":
            self._items[-1].logprobs += self._untold
        status = "incomplete" if cut else "completed"
        rest += self._close(status)
        return rest + self._event(f"response.{status}", response=self._whole(status, usage))

    def failed(self, error: OverspillError, usage: Usage) -> bytes:
        """There is one choice: as `broken`."""
        return self.broken(error, usage)

    def broken(self, error: OverspillError, usage: Usage) -> bytes:
        """The events that end an answer which cannot go on: clients look for one or the other."""
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        response = self._head.response("failed", self._output("incomplete"), usage, error=error)
        return told + self._event("response.failed", response=response)

    def close(self, usage: Usage) -> bytes:  # noqa: ARG002 - the whole response has told it
        """Nothing follows the whole response."""
        return b""

    def body(
        self,
        text: str,
        finish_reason: FinishReason,
        usage: Usage,
        thoughts: str = "",
        logprobs: Mapping[str, object] | None = None,
    ) -> bytes:
        """The body of a reply that is not streamed."""
        if thoughts:
            self.reasoning(thoughts, usage)
        self.text(text, usage, logprobs)
        self.finish(finish_reason, usage)
        return orjson.dumps(self._whole("incomplete" if finish_reason is FinishReason.LENGTH else "completed", usage))

    def _whole(self, status: str, usage: Usage) -> dict[str, object]:
        why = "max_output_tokens" if status == "incomplete" else None
        return self._head.response(status, self._output(status), usage, why=why)

    def _output(self, status: str) -> list[dict[str, object]]:
        """Return all items, of which the last one ends with `status`."""
        last = len(self._items) - 1
        return [item.value(status if index == last else "completed") for index, item in enumerate(self._items)]

    def _piece(self, piece: str | CallDelta) -> bytes:
        if isinstance(piece, str):
            return self._within("message") + self._grown(piece)
        begun = b""
        if piece.name:
            kind: Kind = "custom_tool_call" if self._names.takes_text(piece.name) else "function_call"
            begun = self._begin(Item(kind, self._names.told(piece.name)))
            self._untold = []
        return begun + self._grown(piece.arguments)

    def _within(self, kind: Kind) -> bytes:
        """Return the events that open an item of this kind, none where it is open."""
        return b"" if self._open and self._items[-1].kind == kind else self._begin(Item(kind))

    def _grown(self, piece: str) -> bytes:
        item = self._items[-1]
        told = item.grow(piece)
        if not told:
            return b""
        logprobs: list[object] = []
        if item.kind == "message":
            logprobs, self._untold = self._untold, []
            item.logprobs += logprobs
        kind, fields = item.delta(told, logprobs)
        return self._about(kind, **fields)

    def _begin(self, item: Item) -> bytes:
        closed = self._close("completed")
        self._items.append(item)
        self._open = True
        place = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=place, item=item.value("in_progress"))
        if (part := item.part("")) is not None:
            added += self._about("response.content_part.added", content_index=0, part=part)
        return closed + added

    def _close(self, status: str) -> bytes:
        if not self._open:
            return b""
        self._open = False
        item = self._items[-1]
        kind, fields = item.done()
        done = self._about(kind, **fields)
        if (part := item.part(item.text, item.logprobs)) is not None:
            done += self._about("response.content_part.done", content_index=0, part=part)
        place = len(self._items) - 1
        return done + self._event("response.output_item.done", output_index=place, item=item.value(status))

    def _about(self, kind: str, **fields: object) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[-1].item_id, output_index=place, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _entries(logprobs: Mapping[str, object] | None) -> list[object]:
    found = None if logprobs is None else logprobs.get("content")
    return found if isinstance(found, list) else []
