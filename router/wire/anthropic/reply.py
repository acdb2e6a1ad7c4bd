"""Answers → bodies and events of /v1/messages."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from router.base.errors import OverspillError
from router.values.call_reader import CallReader
from router.values.chunk import FinishReason
from router.values.tool_calls import CallDelta
from router.values.usage import TokenDetails, Usage
from router.wire.anthropic.errors import encode_error_event
from router.wire.openai.tools import arguments_of

SIGNATURE = "unsigned"
"""Of thoughts. Clients send it back with them, and nobody here reads either; Anthropic's own servers refuse it."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_PIECES_A_PING = 32
"""Of thoughts that are not told: a ping says that the answer is still coming."""


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What a reply begins with.

    Attributes:
        model: the variant that answers.
        thoughts: they are told; veiled: but for their text.
    """

    request_id: str
    model: str
    thoughts: bool
    veiled: bool = False

    def message(
        self, content: list[dict[str, object]], reason: str | None, stop: str | None, usage: Usage
    ) -> dict[str, object]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage_of(usage),
        }


def usage_of(usage: Usage) -> dict[str, object]:
    """Return it in this API's words, whose input tokens are those that no cache held or takes."""
    details = usage.details or TokenDetails({}, {})
    read = min(usage.cached_tokens or 0, usage.prompt_tokens)
    written = min(details.prompt.get("cache_write_tokens", 0), usage.prompt_tokens - read)
    told: dict[str, object] = {
        "input_tokens": usage.prompt_tokens - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": usage.completion_tokens,
    }
    if (thought := details.completion.get("reasoning_tokens")) is not None:
        told["output_tokens_details"] = {"thinking_tokens": thought}
    return told


class MessageEncoder:
    """Encodes one answer, event by event, or as a whole.

    Args:
        calls: reads the calls in the text, where the answer may have some.
    """

    def __init__(self, head: MessageHead, calls: CallReader | None = None) -> None:
        self._head = head
        self._calls = calls
        self._kind = ""  # of the block that is open
        self._index = -1
        self._delta = b""
        self._untold = 0

    def start(self, usage: Usage) -> bytes:
        """The events before any block."""
        return _event("message_start", message=self._head.message([], None, None, usage)) + _PING

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes:  # noqa: ARG002
        """The events of further text; this API has no log probabilities."""
        return b"".join(map(self._piece, self._pieces(text)))

    def reasoning(self, text: str, usage: Usage) -> bytes:  # noqa: ARG002
        """The events of further thoughts, or signs of life in their place."""
        if not self._head.thoughts:
            self._untold += 1
            return b"" if self._untold % _PIECES_A_PING else _PING
        begun = self._within("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self._head.veiled:
            self._untold += 1
            return begun if self._untold % _PIECES_A_PING else begun + _PING
        return begun + self._grown(text)

    def finish(self, finish_reason: FinishReason, usage: Usage, stop: str | None = None) -> bytes:
        """The events that close what is open, and say why the answer ends."""
        rest = b"".join(map(self._piece, self._held())) + self._close()
        reason, stop = self._reason(finish_reason, stop)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return rest + _event("message_delta", delta=delta, usage=usage_of(usage))

    def failed(self, error: OverspillError, usage: Usage) -> bytes:
        """There is one choice: as `broken`."""
        return self.broken(error, usage)

    def broken(self, error: OverspillError, usage: Usage) -> bytes:  # noqa: ARG002 - nothing is complete
        """The event that ends the stream."""
        return encode_error_event(error, self._head.request_id)

    def close(self, usage: Usage) -> bytes:  # noqa: ARG002 - told with the reason
        """The end mark."""
        return _STOP

    def body(
        self, text: str, finish_reason: FinishReason, usage: Usage, thoughts: str = "", stop: str | None = None
    ) -> bytes:
        """The body of a reply that is not streamed."""
        content: list[dict[str, object]] = []
        if thoughts and self._head.thoughts:
            shown = "" if self._head.veiled else thoughts
            content.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE})
        for piece in (*self._pieces(text), *self._held()):
            _add(piece, content)
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = orjson.Fragment(arguments_of(str(block["input"])))
        reason, stop = self._reason(finish_reason, stop)
        return orjson.dumps(self._head.message(content, reason, stop, usage))

    def _pieces(self, text: str) -> list[str | CallDelta]:
        if self._calls is None:
            return [text] if text else []
        return self._calls.feed(text)

    def _held(self) -> list[str | CallDelta]:
        return [] if self._calls is None else self._calls.finish()

    def _reason(self, reason: FinishReason, stop: str | None) -> tuple[str, str | None]:
        if reason is FinishReason.LENGTH:
            return "max_tokens", None
        if self._calls is not None and self._calls.calls:
            return "tool_use", None
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _piece(self, piece: str | CallDelta) -> bytes:
        if isinstance(piece, str):
            return self._within("text", {"type": "text", "text": ""}) + self._grown(piece)
        begun = self._begin("tool_use", _called(piece.name) | {"input": {}}) if piece.name else b""
        return begun + self._grown(piece.arguments) if piece.arguments else begun

    def _within(self, kind: str, block: dict[str, object]) -> bytes:
        """Return the events that open a block of this kind, none where it is open."""
        return b"" if self._kind == kind else self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, object]) -> bytes:
        closed = self._close()
        self._kind = kind
        self._index += 1
        delta, field = _DELTAS[kind]
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
            % (self._index, delta, field)
        )
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _grown(self, piece: str) -> bytes:
        return self._delta + orjson.dumps(piece) + b"}}\n\n"

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=self._index, delta=delta)
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)


_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}


def _called(name: str) -> dict[str, object]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}


def _add(piece: str | CallDelta, content: list[dict[str, object]]) -> None:
    """Add a piece of an answer to the last block, or begin one with it; the input of a call is text until its end."""
    if isinstance(piece, CallDelta):
        if piece.name:
            content.append(_called(piece.name) | {"input": ""})
        content[-1]["input"] = f"{content[-1]['input']}{piece.arguments}"
        return
    if not (content and content[-1]["type"] == "text"):
        content.append({"type": "text", "text": ""})
    content[-1]["text"] = f"{content[-1]['text']}{piece}"


def _event(kind: str, **fields: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"
