"""/v1/responses: OpenAI's newer API, without anything kept between calls."""

from __future__ import annotations

import time

from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext, StreamReply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.gateway.sse import EventStream, Extras
from router.gateway.whole import collect
from router.values.prompt import ChatPrompt
from router.wire.openai.logprobs import LogprobEncoder
from router.wire.openai.responses import ResponsesCall, decode_responses
from router.wire.openai.responses_reply import ResponseEncoder, ResponseHead


class ResponsesRoutes:
    """The one handler."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def routes(self) -> list[BaseRoute]:
        respond = self._intake.deferrable(self._respond)
        endpoint = Endpoint("responses", respond, self._intake, admits=True, takes=ResponsesCall)
        return [Route("/v1/responses", endpoint, methods=["POST"])]

    async def _respond(self, context: RequestContext) -> Reply | StreamReply:
        require_json(context)
        request, call = decode_responses(plain_body(context, self._intake.deps.limits.max_body_bytes))
        self._intake.require_model(context, request.model)
        answer, prompt_tokens = await self._intake.start(context, request)
        head = ResponseHead(context.request_id or "", int(time.time()), answer.route.variant, call)
        prompt = request.prompt
        tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
        encoder = ResponseEncoder(head, calls=tools is not None and bool(tools.callable))
        told = None if request.sampling.logprobs is None else LogprobEncoder(chat=True)
        if request.stream:
            extras = Extras(logprobs=told)
            events = EventStream(
                answer, encoder, prompt_tokens, context.request_id, self._intake.metrics, extras=extras
            )
            first = await events.first()
            return StreamReply(self._intake.reply_headers(context, answer), first, events)
        whole = await collect(answer.chunks, prompt_tokens)
        logprobs = None if told is None else told.encode(whole.logprobs)
        body = encoder.body(whole.text, whole.finish_reason, whole.usage, whole.reasoning, logprobs)
        return Reply(body, headers=self._intake.reply_headers(context, answer))
