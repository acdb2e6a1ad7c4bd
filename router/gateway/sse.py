"""A running answer → server-sent events."""

from __future__ import annotations

import structlog

from router.base.errors import OverspillError
from router.gateway.endpoint import internal_error
from router.gateway.intake import unfinished
from router.gateway.metrics import GatewayMetrics
from router.values.answer import Answer
from router.values.request import TokenChunk
from router.values.usage import Usage
from router.wire.openai.errors import encode_error_event
from router.wire.openai.reply import EventEncoder

log = structlog.get_logger("router.gateway")


class EventStream:
    """Encodes chunks as they come; what is there at once goes out in one piece. It is the `Pieces` of a stream.

    Args:
        prompt_tokens: as the gateway counted them; a replica that counted itself corrects it with its last chunk.
    """

    def __init__(
        self,
        answer: Answer,
        encoder: EventEncoder,
        prompt_tokens: int,
        request_id: str | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._answer = answer
        self._encoder = encoder
        self._request_id = request_id
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._cached_tokens: int | None = None
        self._tokens = 0
        self.ended = False

    async def first(self) -> bytes:
        """Return the first events: the role and the first text go out in one piece, at once.

        It is pulled before the head is sent, so that it may still be an error. The first event's running usage tells a
        tier below how much of the prompt was cached, before it learns from the time that the first token took.

        Raises:
            OverspillError: the answer broke before it began.
        """
        async for chunk in self._answer.chunks:
            self._cached_tokens = chunk.cached_tokens
            start = self._encoder.start(Usage(self._prompt_tokens, 0, chunk.cached_tokens))
            return start + self._encode(chunk, first=not start)
        raise unfinished()

    async def next(self) -> bytes:
        """Return the next events; an error becomes the last one."""
        piece = b""
        try:
            while not self.ended and (not piece or self._answer.ready()):
                piece += self._encode(await anext(self._answer.chunks))
        except StopAsyncIteration:
            return piece + self._error(unfinished())
        except OverspillError as error:
            return piece + self._error(error)
        except Exception:  # the task boundary: a bug is logged with its trace and ends the stream visibly
            log.exception("stream crashed", request_id=self._request_id)
            return piece + self._error(internal_error(self._request_id))
        return piece

    def _encode(self, chunk: TokenChunk, *, first: bool = False) -> bytes:
        self._tokens += chunk.tokens
        usage = Usage(self._prompt_tokens, self._tokens, self._cached_tokens if first else None)
        if chunk.finish_reason is None:
            return self._encoder.text(chunk.text, usage) if chunk.text else b""
        if chunk.prompt_tokens is not None:
            self._prompt_tokens = chunk.prompt_tokens
        if self._cached_tokens is None:
            self._cached_tokens = chunk.cached_tokens
        usage = Usage(self._prompt_tokens, self._tokens, self._cached_tokens)
        self.ended = True
        text = self._encoder.text(chunk.text, usage) if chunk.text else b""
        return text + self._encoder.end(chunk.finish_reason, usage)

    def _error(self, error: OverspillError) -> bytes:
        self.ended = True
        self._metrics.stream_errors.labels(error.code).inc()
        log.warning("stream ended with an error", request_id=self._request_id, code=error.code, error=error.message)
        return encode_error_event(error)
