"""A running answer → server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import structlog

from router.base.errors import OverspillError
from router.gateway.endpoint import internal_error
from router.gateway.intake import unfinished
from router.gateway.metrics import GatewayMetrics
from router.values.request import TokenChunk
from router.wire.openai_reply import EventEncoder, Usage, encode_error_event

log = structlog.get_logger("router.gateway")


class EventStream:
    """Encodes chunks as they come; the first one is pulled before the head is sent, so that it may still be an error.

    Args:
        prompt_tokens: as the gateway counted them; a replica that counted itself corrects it with its last chunk.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[TokenChunk, None],
        encoder: EventEncoder,
        prompt_tokens: int,
        request_id: str | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._chunks = chunks
        self._encoder = encoder
        self._request_id = request_id
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._ended = False

    async def first(self) -> bytes:
        """Return the first events: the role and the first text go out in one piece, at once.

        Raises:
            OverspillError: the answer broke before it began.
        """
        start = self._encoder.start(Usage(self._prompt_tokens, 0))
        async for chunk in self._chunks:
            return start + self._encode(chunk)
        raise unfinished()

    async def pieces(self, first: bytes) -> AsyncGenerator[bytes, None]:
        """Yield `first`, then the rest; an error becomes the last event."""
        yield first
        if self._ended:
            return
        try:
            async for chunk in self._chunks:
                piece = self._encode(chunk)
                if piece:
                    yield piece
                if self._ended:
                    return
        except OverspillError as error:
            yield self._error(error)
        except Exception:  # the task boundary: a bug is logged with its trace and ends the stream visibly
            log.exception("stream crashed", request_id=self._request_id)
            yield self._error(internal_error(self._request_id))
        else:
            yield self._error(unfinished())

    def _encode(self, chunk: TokenChunk) -> bytes:
        self._tokens += chunk.tokens
        if chunk.finish_reason is None:
            return self._encoder.text(chunk.text, self._usage()) if chunk.text else b""
        if chunk.prompt_tokens is not None:
            self._prompt_tokens = chunk.prompt_tokens
        self._ended = True
        text = self._encoder.text(chunk.text, self._usage()) if chunk.text else b""
        return text + self._encoder.end(chunk.finish_reason, self._usage())

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._tokens)

    def _error(self, error: OverspillError) -> bytes:
        self._metrics.stream_errors.labels(error.code).inc()
        log.warning("stream ended with an error", request_id=self._request_id, code=error.code, error=error.message)
        return encode_error_event(error)
