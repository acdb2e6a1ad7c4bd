"""/v1/messages, /v1/messages/count_tokens: Anthropic's API, by the same path through the tier as every chat."""

from __future__ import annotations

import orjson
from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext, StreamReply
from router.gateway.errors import Reply, id_lines
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.gateway.sse import EventStream
from router.gateway.whole import collect
from router.values.answer import Answer
from router.values.call_reader import CallReader
from router.values.prompt import ChatPrompt
from router.values.request import ApiRequest
from router.wire.anthropic.fields import CountCall, MessagesCall
from router.wire.anthropic.messages import decode_count, decode_messages
from router.wire.anthropic.reply import MessageEncoder, MessageHead


class MessagesRoutes:
    """The handlers."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def routes(self) -> list[BaseRoute]:
        answer = self._intake.deferrable(self._answer)
        pages = (
            ("/v1/messages", "messages", answer, MessagesCall),
            ("/v1/messages/count_tokens", "count_tokens", self._count, CountCall),
        )
        return [
            Route(path, Endpoint(name, handler, self._intake, admits=True, takes=takes), methods=["POST"])
            for path, name, handler, takes in pages
        ]

    async def _answer(self, context: RequestContext) -> Reply | StreamReply:
        """Answer a conversation in Anthropic's form; whole, or with `stream` as server-sent events."""
        request, call = decode_messages(self._body(context))
        self._intake.require_model(context, request.model)
        answer, prompt_tokens = await self._intake.start(context, request)
        encoder = _encoder(context, request, call, answer)
        headers = [*self._intake.reply_headers(context, answer), *id_lines(context.request_id)]
        if request.stream:
            events = EventStream(answer, encoder, prompt_tokens, context.request_id, self._intake.metrics)
            first = await events.first()
            return StreamReply(headers, first, events, pour=events.pour)
        whole = await collect(answer.chunks, prompt_tokens)
        return Reply(
            encoder.body(whole.text, whole.finish_reason, whole.usage, whole.reasoning, whole.stop), headers=headers
        )

    async def _count(self, context: RequestContext) -> Reply:
        """How many tokens a conversation has, instructions and tools included."""
        request = decode_count(self._body(context))
        self._intake.require_model(context, request.model)
        size = await self._intake.count(context, request)
        return Reply(orjson.dumps({"input_tokens": size.tokens}), headers=id_lines(context.request_id))

    def _body(self, context: RequestContext) -> bytes:
        require_json(context)
        return plain_body(context, self._intake.deps.limits.max_body_bytes)


def _encoder(context: RequestContext, request: ApiRequest, call: MessagesCall, answer: Answer) -> MessageEncoder:
    thinking, prompt = call.thinking, request.prompt
    told = thinking is not None and thinking.type != "disabled"
    veiled = told and thinking is not None and thinking.display == "omitted"
    head = MessageHead(context.request_id or "", answer.route.variant, thoughts=told, veiled=veiled)
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    calls = CallReader.prefilled(request.continuation) if tools is not None and tools.callable else None
    return MessageEncoder(head, calls)
