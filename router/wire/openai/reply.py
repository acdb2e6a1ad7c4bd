"""Answers → bodies and server-sent events of chat and completions. Bytes throughout, through orjson."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import orjson

from router.base.errors import OverspillError
from router.values.chunk import FinishReason
from router.values.usage import Usage
from router.wire.openai.calls import AnswerCalls, whole_message
from router.wire.openai.errors import encode_error_event, error_fields

DONE = b"data: [DONE]\n\n"
FAILED = "error"
"""The finish reason of a choice that broke off while others did not."""


class ReplyHead(msgspec.Struct, frozen=True):
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


class Choice(msgspec.Struct, frozen=True):
    """One choice of a reply that is not streamed.

    Attributes:
        finish_reason: None where it failed.
        logprobs: in OpenAI's shape, None where they are not asked for.
        error: what it failed with; its text is what came before.
        model: the variant that answers, where it is another than that of the reply.
        calls: reads the calls in the text, where the answer may have some.
        reasoning: what the model thought, where its server tells that apart.
        stop: the stop string that ended it, told as vLLM does.
    """

    text: str
    finish_reason: FinishReason | None
    logprobs: Mapping[str, object] | None = None
    error: OverspillError | None = None
    model: str | None = None
    calls: AnswerCalls | None = None
    reasoning: str = ""
    stop: str | None = None

    def to_json(self, index: int, *, chat: bool) -> dict[str, object]:
        choice: dict[str, object] = {"index": index}
        told = FAILED if self.finish_reason is None else self.finish_reason.value
        if self.calls is not None and self.finish_reason is not None:
            message, told = whole_message(self.text, self.finish_reason, self.calls)
            choice["message"] = message | _thought(self.reasoning)
        elif chat:
            message = {"role": "assistant", "content": self.text, "refusal": None}
            choice["message"] = message | _thought(self.reasoning)
        else:
            choice["text"] = self.text
        choice["logprobs"] = self.logprobs
        choice["finish_reason"] = told
        if self.stop is not None:
            choice["stop_reason"] = self.stop
        if self.error is not None:
            choice["error"] = error_fields(self.error)
        if self.model is not None:
            choice["model"] = self.model
        return choice


def _thought(reasoning: str) -> dict[str, object]:
    """Return it by both names that clients look for: vLLM's newer one, and the one of all others."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def encode_body(head: ReplyHead, choices: Sequence[Choice], usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    body = head.fields("chat.completion" if head.chat else "text_completion")
    body["choices"] = [choice.to_json(index, chat=head.chat) for index, choice in enumerate(choices)]
    body["usage"] = usage.to_json()
    return orjson.dumps(body)


class EventEncoder:
    """Encodes the stream of one choice. What does not change in an event is serialised once; a token costs one escape.

    Args:
        include_usage: events carry `"usage":null`, and the stream ends with a usage event without choices.
        running_usage: events carry the usage so far.
        index: of the choice.
        calls: reads the calls in the text, where the answer may have some.
    """

    def __init__(
        self,
        head: ReplyHead,
        *,
        include_usage: bool,
        running_usage: bool,
        index: int = 0,
        calls: AnswerCalls | None = None,
    ) -> None:
        self._head = head
        self._calls = calls
        self._include_usage = include_usage
        self._running_usage = running_usage
        common = orjson.dumps(head.fields("chat.completion.chunk" if head.chat else "text_completion"))[:-1]
        opened = b',"choices":[{"index":%d,' % index
        self._open = b"data: " + common + opened + (b'"delta":' if head.chat else b'"text":')
        self._text_open = self._open + (b'{"content":' if head.chat else b"")
        self._text_close = (b"}" if head.chat else b"") + b',"logprobs":null,"finish_reason":null}]'
        self._usage_open = b"data: " + common + b',"choices":[],"usage":'

    def start(self, usage: Usage) -> bytes:
        """The event that names the role; nothing for text completions."""
        return self._event(b'{"role":"assistant","content":""}', None, usage) if self._head.chat else b""

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes:
        if self._calls is None:
            if logprobs is None:
                return self._text_open + orjson.dumps(text) + self._text_close + self._tail(usage)
            return self._event(self._piece(text), None, usage, logprobs)
        deltas = [orjson.dumps(delta) for delta in self._calls.deltas(text)]
        if not deltas and logprobs is not None:
            deltas = [b"{}"]  # the text waits: it may be a call
        return b"".join(self._event(delta, None, usage, None if at else logprobs) for at, delta in enumerate(deltas))

    def reasoning(self, text: str, usage: Usage) -> bytes:
        """The event of what the model thought; completions have no place for it."""
        return self._event(orjson.dumps(_thought(text)), None, usage) if self._head.chat else b""

    def finish(self, finish_reason: FinishReason, usage: Usage, stop: str | None = None) -> bytes:
        """The event with the finish reason, and as vLLM tells it, the stop string that ended the answer."""
        rest, told = ([], finish_reason.value) if self._calls is None else self._calls.end(finish_reason)
        last = b"".join(self._event(orjson.dumps(delta), None, usage) for delta in rest)
        more = b"" if stop is None else b',"stop_reason":' + orjson.dumps(stop)
        return last + self._event(self._nothing, told, usage, more=more)

    def failed(self, error: OverspillError, usage: Usage) -> bytes:
        """The event that ends a choice which cannot go on, while others do."""
        more = b',"error":' + orjson.dumps(error_fields(error))
        return self._event(self._nothing, FAILED, usage, more=more)

    def broken(self, error: OverspillError, usage: Usage) -> bytes:  # noqa: ARG002 - nothing is complete
        """The event that ends the stream."""
        return encode_error_event(error)

    def close(self, usage: Usage) -> bytes:
        """The usage event if it was asked for, and the end mark."""
        told = self._usage_open + orjson.dumps(usage.to_json()) + b"}\n\n" if self._include_usage else b""
        return told + DONE

    @property
    def _nothing(self) -> bytes:
        return b"{}" if self._head.chat else b'""'

    def _piece(self, text: str) -> bytes:
        escaped = orjson.dumps(text)
        return b'{"content":' + escaped + b"}" if self._head.chat else escaped

    def _event(
        self,
        piece: bytes,
        reason: str | None,
        usage: Usage,
        logprobs: Mapping[str, object] | None = None,
        *,
        more: bytes = b"",
    ) -> bytes:
        told = b"null" if logprobs is None else orjson.dumps(logprobs)
        ends = b"null" if reason is None else b'"' + reason.encode() + b'"'
        event = self._open + piece + b',"logprobs":' + told + b',"finish_reason":' + ends + more + b"}]"
        return event + self._tail(usage)

    def _tail(self, usage: Usage) -> bytes:
        if self._running_usage:
            return b',"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"
        return b',"usage":null}\n\n' if self._include_usage else b"}\n\n"
