"""Answers → bodies and server-sent events of chat and completions. Bytes throughout, through orjson."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from router.values.request import FinishReason
from router.values.usage import Usage
from router.wire.openai.calls import AnswerCalls, whole_message

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every event and body of one reply repeats.

    Attributes:
        created_s: Unix time, whole seconds.
        model: the variant that answers.
    """

    chat: bool
    request_id: str
    created_s: int
    model: str

    def fields(self, kind: str) -> dict[str, object]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }


def encode_body(
    head: ReplyHead, text: str, finish_reason: FinishReason, usage: Usage, calls: AnswerCalls | None = None
) -> bytes:
    """Return the body of a reply that is not streamed.

    Args:
        calls: reads the calls in the text, where the answer may have some.
    """
    choice: dict[str, object] = {"index": 0}
    told = finish_reason.value
    if calls is not None:
        choice["message"], told = whole_message(text, finish_reason, calls)
    elif head.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice["logprobs"] = None
    choice["finish_reason"] = told
    body = head.fields("chat.completion" if head.chat else "text_completion")
    body["choices"] = [choice]
    body["usage"] = usage.to_json()
    return orjson.dumps(body)


class EventEncoder:
    """Encodes one stream. The unchanging parts of an event are serialised once; a token costs one string escape.

    Args:
        include_usage: events carry `"usage":null`, and the stream ends with a usage event without choices.
        running_usage: events carry the usage so far.
        calls: reads the calls in the text, where the answer may have some.
    """

    def __init__(
        self, head: ReplyHead, *, include_usage: bool, running_usage: bool, calls: AnswerCalls | None = None
    ) -> None:
        self._head = head
        self._calls = calls
        self._include_usage = include_usage
        self._running_usage = running_usage
        common = orjson.dumps(head.fields("chat.completion.chunk" if head.chat else "text_completion"))[:-1]
        self._open = b"data: " + common + b',"choices":[{"index":0,' + (b'"delta":' if head.chat else b'"text":')
        self._usage_open = b"data: " + common + b',"choices":[],"usage":'

    def start(self, usage: Usage) -> bytes:
        """The event that names the role; nothing for text completions."""
        return self._event(b'{"role":"assistant","content":""}', None, usage) if self._head.chat else b""

    def text(self, text: str, usage: Usage) -> bytes:
        if self._calls is None:
            return self._event(self._piece(text), None, usage)
        return b"".join(self._event(orjson.dumps(delta), None, usage) for delta in self._calls.deltas(text))

    def end(self, finish_reason: FinishReason, usage: Usage) -> bytes:
        """The event with the finish reason, the usage event if it was asked for, and the end mark."""
        rest, told = ([], finish_reason.value) if self._calls is None else self._calls.end(finish_reason)
        last = b"".join(self._event(orjson.dumps(delta), None, usage) for delta in rest)
        last += self._event(b"{}" if self._head.chat else b'""', told, usage)
        if self._include_usage:
            last += self._usage_open + orjson.dumps(usage.to_json()) + b"}\n\n"
        return last + DONE

    def _piece(self, text: str) -> bytes:
        escaped = orjson.dumps(text)
        return b'{"content":' + escaped + b"}" if self._head.chat else escaped

    def _event(self, piece: bytes, finish_reason: str | None, usage: Usage) -> bytes:
        reason = b"null" if finish_reason is None else b'"' + finish_reason.encode() + b'"'
        event = self._open + piece + b',"logprobs":null,"finish_reason":' + reason + b"}]"
        if self._running_usage:
            event += b',"usage":' + orjson.dumps(usage.to_json())
        elif self._include_usage:
            event += b',"usage":null'
        return event + b"}\n\n"
