"""Rerank, score and audio: calls for servers behind this tier, whose replies go back as they are."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from starlette.routing import BaseRoute, Route

from router.base.errors import OverspillError
from router.gateway.endpoint import BrokenOff, Endpoint, Handler, RequestContext, StreamReply, internal_error
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.gateway.whole import collect_output, unfinished
from router.values.answer import Answer
from router.values.request import ApiRequest
from router.values.task import Passed, PassedCall, Task
from router.wire.openai.errors import encode_error_event
from router.wire.openai.passed import (
    RERANK_PATH,
    SCORE_PATH,
    SOUND_PATHS,
    SPEECH_PATH,
    RerankBody,
    ScoreBody,
    SpeechBody,
    decode_rerank,
    decode_score,
    decode_sound,
    decode_speech,
    renamed,
)
from router.wire.promise import refuse_deferring

log = structlog.get_logger("router.gateway")

_EVENTS = "text/event-stream"
Decode = Callable[[bytes], ApiRequest]


class PassedRoutes:
    """The handlers: what they take apart of a body is the model, and how much there is to do."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._max_body_bytes = intake.deps.limits.max_body_bytes

    def routes(self) -> list[BaseRoute]:
        rerank, score = self._json("rerank", self._rerank, RerankBody), self._json("score", self._score, ScoreBody)
        sounds = {Task.TRANSCRIBE: self._transcribe, Task.TRANSLATE: self._translate}
        return [
            *(Route(path, rerank, methods=["POST"]) for path in (RERANK_PATH, "/rerank", "/v2/rerank")),
            *(Route(path, score, methods=["POST"]) for path in (SCORE_PATH, "/score")),
            Route(SPEECH_PATH, self._json("speech", self._speech, SpeechBody), methods=["POST"]),
            *(
                Route(SOUND_PATHS[task], Endpoint(task.value, handler, self._intake, admits=True), methods=["POST"])
                for task, handler in sounds.items()
            ),
        ]

    def _json(self, name: str, handler: Handler, takes: type) -> Endpoint:
        return Endpoint(name, handler, self._intake, admits=True, takes=takes)

    async def _rerank(self, context: RequestContext) -> Reply | StreamReply:
        """How near each document is to a query, the nearest first."""
        return await self._passed(context, Task.RERANK, self._decoded(context, decode_rerank))

    async def _score(self, context: RequestContext) -> Reply | StreamReply:
        """How near texts are to each other."""
        return await self._passed(context, Task.SCORE, self._decoded(context, decode_score))

    async def _speech(self, context: RequestContext) -> Reply | StreamReply:
        """Speak a text; the sound comes as it is made."""
        return await self._passed(context, Task.SPEAK, self._decoded(context, decode_speech))

    async def _transcribe(self, context: RequestContext) -> Reply | StreamReply:
        """Write down what is said, in its own language; with `stream` as server-sent events."""
        return await self._sound(context, Task.TRANSCRIBE)

    async def _translate(self, context: RequestContext) -> Reply | StreamReply:
        """Write down what is said, in English."""
        return await self._sound(context, Task.TRANSLATE)

    async def _sound(self, context: RequestContext, task: Task) -> Reply | StreamReply:
        body = plain_body(context, self._max_body_bytes)
        return await self._passed(context, task, decode_sound(body, context.headers.get("content-type", ""), task))

    def _decoded(self, context: RequestContext, decode: Decode) -> ApiRequest:
        require_json(context)
        return decode(plain_body(context, self._max_body_bytes))

    async def _passed(self, context: RequestContext, task: Task, asked: ApiRequest) -> Reply | StreamReply:
        refuse_deferring(context.headers)
        self._intake.require_model(context, asked.model, task)
        answer, prompt_tokens = await self._intake.start(context, asked)
        if not (isinstance(asked.prompt, PassedCall) and asked.prompt.streams):
            whole, _ = await collect_output(answer.chunks, prompt_tokens, Passed)
            lines = self._intake.reply_headers(context, answer)
            body = renamed(whole.data, whole.media_type, answer.route.variant)
            return Reply(body, headers=lines, media_type=whole.media_type)
        pieces = PassedPieces(answer, context.request_id)
        first = await pieces.first()
        lines = self._intake.reply_headers(context, answer)
        return StreamReply(lines, first, pieces, pieces.media_type)


class PassedPieces:
    """A reply as it comes: the `Pieces` of a stream.

    Attributes:
        media_type: known with the first piece.
    """

    def __init__(self, answer: Answer, request_id: str | None) -> None:
        self._answer = answer
        self._request_id = request_id
        self.media_type = ""
        self.ended = False

    async def first(self) -> bytes:
        """Return the first piece. It is there before the head is sent, which may still tell of an error.

        Raises:
            OverspillError: nothing came.
        """
        async for chunk in self._answer.chunks:
            if isinstance(chunk.output, Passed):
                self.media_type = chunk.output.media_type
                return chunk.output.data
        raise unfinished()

    async def next(self) -> bytes:
        """See `Pieces`."""
        try:
            async for chunk in self._answer.chunks:
                if isinstance(chunk.output, Passed):
                    return chunk.output.data
                if chunk.finish_reason is not None:
                    self.ended = True
                    return b""
        except OverspillError as error:
            return self._broken(error)
        except Exception:  # the task boundary: a bug is logged with its trace and ends the stream visibly
            log.exception("stream crashed", request_id=self._request_id)
            return self._broken(internal_error(self._request_id))
        return self._broken(unfinished())

    def _broken(self, error: OverspillError) -> bytes:
        """Return the event that ends events; a sound has no word for it."""
        self.ended = True
        if self.media_type.startswith(_EVENTS):
            return encode_error_event(error)
        raise BrokenOff(error.message)
