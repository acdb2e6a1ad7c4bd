"""One call of chat or completions: its choices, in one piece or as events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from router.base.errors import OverspillError
from router.gateway.choices import ChoiceStream, Interleaved, parts_of, total
from router.gateway.echo import echo_of
from router.gateway.endpoint import RequestContext, StreamReply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.parts import Answered, answer_all
from router.gateway.sse import ChoiceEvents, Encoder, EventStream, Extras
from router.gateway.whole import collect, unfinished
from router.values.answer import Answer
from router.values.prompt import ChatPrompt, Input
from router.values.request import ApiRequest
from router.values.usage import Usage
from router.wire.names import DEGRADED, HOPS
from router.wire.openai.brief import BriefEncoder
from router.wire.openai.calls import AnswerCalls
from router.wire.openai.logprobs import LogprobEncoder
from router.wire.openai.reply import Choice, EventEncoder, ReplyHead, encode_body


class Generation:
    """See the module.

    Args:
        body: as it was received; what a link has to carry is measured by it.
    """

    def __init__(self, intake: Intake, context: RequestContext, call: ApiRequest, body: bytes) -> None:
        self._intake = intake
        self._context = context
        self._call = call
        self._chat = isinstance(call.prompt, ChatPrompt)
        self._parts = parts_of(call, body)
        self._created_s = int(time.time())

    def reply(self) -> Awaitable[Reply | StreamReply]:
        """Answer it.

        Raises:
            OverspillError: any of the tree; no choice was answered.
        """
        if len(self._parts) > 1:
            return self._stream_all() if self._call.stream else self._answer_all()
        return self._stream_one() if self._call.stream else self._answer_one()

    async def _answer_one(self) -> Reply:
        answer, prompt_tokens = await self._begin()
        whole = await collect(answer.chunks, prompt_tokens)
        body = encode_body(
            self._head(answer), [self._choice(Answered(whole, answer), answer, self._call.prompt)], whole.usage
        )
        return Reply(body, headers=self._intake.reply_headers(self._context, answer))

    async def _stream_one(self) -> StreamReply:
        answer, prompt_tokens = await self._begin()
        stream = EventStream(
            answer,
            self._encoder(answer),
            prompt_tokens,
            self._context.request_id,
            self._intake.metrics,
            extras=self._extras(self._call.prompt),
        )
        first = await stream.first()
        return StreamReply(self._intake.reply_headers(self._context, answer), first, stream, pour=stream.pour)

    async def _answer_all(self) -> Reply:
        found = await answer_all(self._intake, self._context, self._parts)
        answered = [one for one in found if isinstance(one, Answered)]
        if not answered:
            raise next(one for one in found if isinstance(one, OverspillError))
        first = answered[0].answer
        usages = [one.whole.usage if isinstance(one, Answered) else Usage(0, 0) for one in found]
        choices = [
            self._choice(one, first, part.request.prompt) if isinstance(one, Answered) else Choice("", None, error=one)
            for one, part in zip(found, self._parts, strict=True)
        ]
        lines = self._intake.reply_headers(self._context, first)
        if any(one.answer.route.degraded for one in answered):
            lines = [(name, "true" if name == DEGRADED else value) for name, value in lines]
        return Reply(encode_body(self._head(first), choices, total(usages, self._call.n)), headers=lines)

    async def _stream_all(self) -> StreamReply:
        source = Interleaved(self._intake, self._context, self._parts)
        stream = ChoiceStream(
            source,
            len(self._parts),
            self._call.n,
            self._new_events,
            (self._intake.metrics, self._context.request_id),
        )
        self._context.chunks = stream.news
        first = await stream.first()
        if stream.first_answer is None:
            raise unfinished()
        return StreamReply(self._intake.reply_headers(self._context, stream.first_answer), first, stream)

    def _new_events(self, index: int, prompt_tokens: int, first: Answer, usage: Callable[[], Usage]) -> ChoiceEvents:
        extras = self._extras(self._parts[index].request.prompt)
        return ChoiceEvents(self._encoder(first, index), prompt_tokens, extras, usage)

    def _begin(self) -> Awaitable[tuple[Answer, int]]:
        return self._intake.start(self._context, self._call)

    def _head(self, answer: Answer) -> ReplyHead:
        return ReplyHead(
            chat=self._chat,
            request_id=self._context.request_id or "",
            created_s=self._created_s,
            model=answer.route.variant,
        )

    def _encoder(self, answer: Answer, index: int = 0) -> Encoder:
        call, head, calls = self._call, self._head(answer), self._calls()
        if call.brief and len(self._parts) == 1:
            return BriefEncoder(head, calls)
        return EventEncoder(
            head, include_usage=call.include_usage, running_usage=call.running_usage, index=index, calls=calls
        )

    def _extras(self, prompt: Input) -> Extras:
        call = self._call
        return Extras(
            echo=echo_of(self._intake.deps.prompts, call, prompt) if call.echo else None,
            logprobs=None if call.sampling.logprobs is None else LogprobEncoder(chat=self._chat),
        )

    def _choice(self, answered: Answered, first: Answer, prompt: Input) -> Choice:
        whole, extras = answered.whole, self._extras(prompt)
        variant = answered.answer.route.variant
        told = (*whole.prompt_logprobs, *whole.logprobs)
        return Choice(
            ("" if extras.echo is None else extras.echo.before(whole.prompt_logprobs)) + whole.text,
            whole.finish_reason,
            None if extras.logprobs is None else extras.logprobs.encode(told),
            model=None if variant == first.route.variant else variant,
            calls=self._calls(),
            reasoning=whole.reasoning,
            stop=whole.stop,
        )

    def _calls(self) -> AnswerCalls | None:
        """Return what reads the calls of an answer, None where it can have none."""
        call = self._call
        if not isinstance(call.prompt, ChatPrompt) or call.prompt.tools is None or not call.prompt.tools.callable:
            return None
        # A tier's beginning is an answer that its client has seen so far; anybody else's, nobody was told as calls.
        told = HOPS in self._context.headers
        return AnswerCalls(call.continuation, told=told, legacy=call.legacy_functions, customs=call.custom_tools)
