"""Events for a tier below ours, which knows what each of OpenAI's events repeats: 40 bytes a token instead of 300.

They are asked for by `stream_options.overspill_brief`, and are OpenAI's events with much left out. The first tells who
answers, and of the prompt; one that is not the first or the last holds what is new, and no usage where that is one
token; the last tells the usage, so that none follows it.
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from router.base.errors import OverspillError
from router.values.chunk import FinishReason
from router.values.usage import Usage
from router.wire.openai.calls import AnswerCalls
from router.wire.openai.reply import EventEncoder, ReplyHead

_TEXT = b'data: {"choices":[{"text":'
_DELTA = b'data: {"choices":[{"delta":'
_END = b"}]}\n\n"


class BriefEncoder:
    """Encodes the stream of one choice that has no other beside it.

    Args:
        calls: reads the calls in the text, where the answer may have some.
    """

    def __init__(self, head: ReplyHead, calls: AnswerCalls | None = None) -> None:
        self._whole = EventEncoder(head, include_usage=False, running_usage=True, calls=calls)
        self._chat = head.chat
        self._calls = calls
        self._known: Usage | None = None
        """What the reader knows; None before the first event."""

    def start(self, usage: Usage) -> bytes:
        """The event that names the role; nothing for text completions."""
        if self._chat:
            self._known = usage
        return self._whole.start(usage)

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes:
        if logprobs is not None or self._known is None:
            self._known = usage
            return self._whole.text(text, usage, logprobs)
        if self._calls is None:
            return self._counted(_TEXT + orjson.dumps(text), 1, usage)
        deltas = [_DELTA + orjson.dumps(delta) for delta in self._calls.deltas(text)]
        return self._counted(_END.join(deltas), len(deltas), usage) if deltas else b""

    def reasoning(self, text: str, usage: Usage) -> bytes:
        """The event of what the model thought; completions have no place for it."""
        return self._counted(_DELTA + orjson.dumps({"reasoning": text}), 1, usage) if self._chat else b""

    def finish(self, finish_reason: FinishReason, usage: Usage, stop: str | None = None) -> bytes:
        """The event with the finish reason."""
        return self._whole.finish(finish_reason, usage, stop)

    def failed(self, error: OverspillError, usage: Usage) -> bytes:
        """The event that ends the choice with an error."""
        return self._whole.failed(error, usage)

    def broken(self, error: OverspillError, usage: Usage) -> bytes:
        """The event that ends the stream."""
        return self._whole.broken(error, usage)

    def close(self, usage: Usage) -> bytes:
        """The end mark."""
        return self._whole.close(usage)

    def _counted(self, events: bytes, pieces: int, usage: Usage) -> bytes:
        """Return events that lack their end; it tells the usage, but where that is one token more for each piece."""
        known, self._known = self._known, usage
        if known is not None and usage == Usage(known.prompt_tokens, known.completion_tokens + pieces):
            return events + _END
        return events + b'}],"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"
