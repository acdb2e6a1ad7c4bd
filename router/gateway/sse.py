"""A running answer → server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import structlog
from msgspec.structs import replace

from router.base.errors import OverspillError
from router.gateway.echo import Echo
from router.gateway.endpoint import Sink, internal_error
from router.gateway.metrics import GatewayMetrics
from router.gateway.whole import unfinished
from router.values.answer import Answer, tapped
from router.values.chunk import FinishReason, TokenChunk
from router.values.usage import Usage
from router.wire.openai.logprobs import LogprobEncoder

log = structlog.get_logger("router.gateway")


class Encoder(Protocol):
    """What makes events of one choice, one API's way."""

    def start(self, usage: Usage) -> bytes: ...

    def text(self, text: str, usage: Usage, logprobs: Mapping[str, object] | None = None) -> bytes: ...

    def reasoning(self, text: str, usage: Usage) -> bytes: ...

    def finish(self, finish_reason: FinishReason, usage: Usage, stop: str | None = None) -> bytes: ...

    def failed(self, error: OverspillError, usage: Usage) -> bytes: ...

    def broken(self, error: OverspillError, usage: Usage) -> bytes: ...

    def close(self, usage: Usage) -> bytes: ...


class Extras(msgspec.Struct, frozen=True):
    """What an answer tells beside its text.

    Attributes:
        echo: the prompt, which it begins with; None if it does not.
        logprobs: encodes the log probabilities of its tokens; None where they are not asked for.
    """

    echo: Echo | None = None
    logprobs: LogprobEncoder | None = None


class ChoiceEvents:
    """Encodes the chunks of one choice.

    Args:
        prompt_tokens: as the gateway counted them; a replica that counted itself corrects it with its last chunk.
        of_all: the usage that its events tell, where there are other choices beside it.

    Attributes:
        usage: of this choice so far.
        begun, ended: its first chunk has come, and its last.
    """

    def __init__(
        self,
        encoder: Encoder,
        prompt_tokens: int,
        extras: Extras | None = None,
        of_all: Callable[[], Usage] | None = None,
    ) -> None:
        self.usage = Usage(prompt_tokens, 0)
        self.begun = self.ended = False
        self._encoder = encoder
        self._extras = extras or Extras()
        self._of_all = of_all
        self._cached_tokens: int | None = None

    def begin(self, chunk: TokenChunk) -> bytes:
        """Return the events of the first chunk: the role, the echoed prompt and the first text, all at once.

        The first event's running usage tells a tier below how long the prompt is and how much of it was cached, before
        it learns from the time that the first token took.
        """
        self.begun = True
        self._cached_tokens = chunk.cached_tokens
        usage = Usage(chunk.prompt_tokens or self.usage.prompt_tokens, 0, chunk.cached_tokens)
        self.usage = replace(self.usage, prompt_tokens=usage.prompt_tokens)
        start = self._encoder.start(self._told(usage))
        if self._extras.echo is not None:
            line = self._extras.logprobs
            logprobs = None if line is None else line.encode(chunk.prompt_logprobs)
            start += self._encoder.text(self._extras.echo.before(chunk.prompt_logprobs), self._told(usage), logprobs)
        return start + self.add(chunk, first=not start)

    def add(self, chunk: TokenChunk, *, first: bool = False) -> bytes:
        """Return the events of a further chunk; none for one that shows nothing."""
        prompt_tokens, tokens = self.usage.prompt_tokens, self.usage.completion_tokens + chunk.tokens
        if chunk.finish_reason is None:
            self.usage = Usage(prompt_tokens, tokens, self._cached_tokens if first else None)
            return self._text(chunk)
        self.ended = True
        cached_tokens = chunk.cached_tokens if self._cached_tokens is None else self._cached_tokens
        self.usage = Usage(chunk.prompt_tokens or prompt_tokens, tokens, cached_tokens, chunk.details)
        return self._text(chunk) + self._encoder.finish(chunk.finish_reason, self._told(self.usage), chunk.stop)

    def fail(self, error: OverspillError) -> bytes:
        """Return the event that ends this choice while others go on."""
        self.ended = True
        return self._encoder.failed(error, self._told(self.usage))

    def broken(self, error: OverspillError) -> bytes:
        """Return the end of a stream that cannot go on."""
        return self._encoder.broken(error, self._told(self.usage))

    def close(self, usage: Usage) -> bytes:
        """Return the end of the stream, once all its choices have ended."""
        return self._encoder.close(usage)

    def _text(self, chunk: TokenChunk) -> bytes:
        if chunk.reasoning:
            thought = self._encoder.reasoning(chunk.reasoning, self._told(self.usage))
            return thought + self._text(replace(chunk, reasoning=""))
        if not (chunk.text or chunk.logprobs):
            return b""
        line = self._extras.logprobs
        logprobs = None if line is None else line.encode(chunk.logprobs)
        return self._encoder.text(chunk.text, self._told(self.usage), logprobs)

    def _told(self, usage: Usage) -> Usage:
        return usage if self._of_all is None else self._of_all()


class EventStream:
    """Encodes chunks as they come; what is there at once goes out in one piece. It is the `Pieces` of a stream.

    Args:
        prompt_tokens: see `ChoiceEvents`.
    """

    def __init__(
        self,
        answer: Answer,
        encoder: Encoder,
        prompt_tokens: int,
        request_id: str | None,
        metrics: GatewayMetrics,
        *,
        extras: Extras | None = None,
    ) -> None:
        self._answer = answer
        self._request_id = request_id
        self._metrics = metrics
        self._choice = ChoiceEvents(encoder, prompt_tokens, extras)
        self._sink: Sink | None = None
        self.ended = False

    def pour(self, sink: Sink) -> None:
        """Write events to `sink` as they come, while the next ones are waited for; call it once what came is sent."""
        chunks = tapped(self._answer.chunks)
        if chunks is not None:
            self._sink = sink
            chunks.tap(self)

    @property
    def full(self) -> bool:
        """See `router.values.answer.Tap`."""
        return self._sink is None or self._sink.full

    def give(self, chunks: list[TokenChunk]) -> None:
        """See `router.values.answer.Tap`."""
        if self._sink is not None:
            self._sink.write(b"".join([self._choice.add(chunk) for chunk in chunks]))

    async def first(self) -> bytes:
        """Return the first events. They are pulled before the head is sent, so that they may still be an error.

        Raises:
            OverspillError: the answer broke before it began.
        """
        async for chunk in self._answer.chunks:
            return self._closed(self._choice.begin(chunk))
        raise unfinished()

    async def next(self) -> bytes:
        """Return the next events; an error becomes the last one."""
        piece = b""
        try:
            while not self.ended and (not piece or self._answer.ready()):
                piece += self._closed(self._choice.add(await anext(self._answer.chunks)))
        except StopAsyncIteration:
            return piece + self._error(unfinished())
        except OverspillError as error:
            return piece + self._error(error)
        except Exception:  # the task boundary: a bug is logged with its trace and ends the stream visibly
            log.exception("stream crashed", request_id=self._request_id)
            return piece + self._error(internal_error(self._request_id))
        return piece

    def _closed(self, events: bytes) -> bytes:
        """Add the end of the stream to the last events of the choice."""
        if not self._choice.ended:
            return events
        self.ended = True
        return events + self._choice.close(self._choice.usage)

    def _error(self, error: OverspillError) -> bytes:
        self.ended = True
        self._metrics.stream_errors.labels(error.code).inc()
        log.warning("stream ended with an error", request_id=self._request_id, code=error.code, error=error.message)
        return self._choice.broken(error)
