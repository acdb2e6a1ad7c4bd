"""A running answer → the pieces of …/generate_stream."""

from __future__ import annotations

from dataclasses import replace

import orjson
import structlog

from router.base.errors import OverspillError
from router.gateway.endpoint import internal_error
from router.gateway.metrics import GatewayMetrics
from router.gateway.whole import unfinished
from router.values.answer import Answer
from router.values.chunk import TokenChunk
from router.values.usage import Usage
from router.wire.kserve.call import InferCall
from router.wire.kserve.generate import encode_generate
from router.wire.kserve.reply import Row

log = structlog.get_logger("router.gateway")


class GenerateStream:
    """Encodes chunks as they come; what is there at once is one event. It is the `Pieces` of a stream.

    Each event has the text since the one before; its `num_output_tokens`, where asked for, counts that piece alone. The
    last event has the finish reason. An error ends the stream visibly, as an event with `error`.
    """

    def __init__(
        self,
        model: str,
        call: InferCall,
        answer: Answer,
        prompt_tokens: int,
        *,
        request_id: str | None,
        metrics: GatewayMetrics,
    ) -> None:
        self._model = model
        self._call = replace(call, echo=False)  # what is repeated goes out once, with the first piece
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._request_id = request_id
        self._metrics = metrics
        self._echo = call.prompts[0].text if call.echo else ""
        self._broken: OverspillError | None = None
        self.ended = False

    async def first(self) -> bytes:
        """Return the first event. It is pulled before the head is sent, so that it may still be an error.

        Raises:
            OverspillError: the answer broke before it began.
        """
        return await self._event()

    async def next(self) -> bytes:
        """Return the next event; an error becomes the last one."""
        try:
            return await self._event()
        except OverspillError as error:
            return self._error(error)
        except Exception:  # the task boundary: a bug is logged with its trace and ends the stream visibly
            log.exception("stream crashed", request_id=self._request_id)
            return self._error(internal_error(self._request_id))

    async def _event(self) -> bytes:
        """Return what is there of text as one event; a break behind it is the next one's."""
        text, tokens = "", 0
        if self._broken is not None:
            raise self._broken
        while True:
            try:
                chunk: TokenChunk = await anext(self._answer.chunks)
            except (StopAsyncIteration, OverspillError) as error:
                self._broken = error if isinstance(error, OverspillError) else unfinished()
                if not text:
                    raise self._broken from None
                return self._encode(Row(text, None, Usage(self._prompt_tokens, tokens)))
            text, tokens = text + chunk.text, tokens + chunk.tokens
            self._prompt_tokens = chunk.prompt_tokens or self._prompt_tokens
            self.ended = chunk.finish_reason is not None
            if self.ended or (text and not self._answer.ready()):
                return self._encode(Row(text, chunk.finish_reason, Usage(self._prompt_tokens, tokens)))

    def _encode(self, row: Row) -> bytes:
        row, self._echo = replace(row, text=self._echo + row.text), ""
        return b"data: " + encode_generate(self._model, self._call, row) + b"\n\n"

    def _error(self, error: OverspillError) -> bytes:
        self.ended = True
        self._metrics.stream_errors.labels(error.code).inc()
        log.warning("stream ended with an error", request_id=self._request_id, code=error.code, error=error.message)
        return b"data: " + orjson.dumps({"error": error.message}) + b"\n\n"
