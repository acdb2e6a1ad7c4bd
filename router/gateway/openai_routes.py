"""/v1/models, /v1/chat/completions, /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext, StreamReply, json_reply
from router.gateway.errors import Dialect, Reply, id_lines
from router.gateway.generation import Generation
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.values.replica import ReplicaInfo
from router.values.request import ApiRequest
from router.wire.anthropic import models as anthropic
from router.wire.openai.chat import CHAT_BODY, decode_chat
from router.wire.openai.completion import COMPLETION_BODY, decode_completion
from router.wire.openai.models import encode_models, model_cards


class OpenAIRoutes:
    """The handlers of the OpenAI API."""

    def __init__(self, intake: Intake) -> None:
        self._deps = intake.deps
        self._intake = intake
        self._created_s = int(time.time())

    def routes(self) -> list[BaseRoute]:
        def page(path: str, name: str, handler: Any, takes: type | None = None) -> Route:
            methods = ["GET"] if takes is None else ["POST"]
            admits = takes is not None
            handler = self._intake.deferrable(handler) if admits else handler
            return Route(path, Endpoint(name, handler, self._intake, admits=admits, takes=takes), methods=methods)

        return [
            page("/v1/chat/completions", "chat", self._chat, CHAT_BODY),
            page("/v1/completions", "completions", self._completions, COMPLETION_BODY),
            page("/v1/models", "models", self._list_models),
            page("/v1/models/{model:path}", "model", self._show_model),
        ]

    def _chat(self, context: RequestContext) -> Awaitable[Reply | StreamReply]:
        """Answer a conversation; whole, or with `stream` as server-sent events."""
        return self._generate(context, decode_chat)

    def _completions(self, context: RequestContext) -> Awaitable[Reply | StreamReply]:
        """Continue a raw prompt; whole, or with `stream` as server-sent events."""
        return self._generate(context, decode_completion)

    async def _generate(self, context: RequestContext, decode: Callable[[bytes], ApiRequest]) -> Reply | StreamReply:
        require_json(context)
        body = plain_body(context, self._deps.limits.max_body_bytes)
        call = decode(body)
        self._intake.require_model(context, call.model)
        return await Generation(self._intake, context, call, body).reply()

    async def _list_models(self, context: RequestContext) -> Reply:
        """Families and variants that may be asked for; in Anthropic's form to its clients (`anthropic-version`)."""
        if context.dialect is Dialect.ANTHROPIC:
            page = anthropic.encode_page(self._cards(context), context.query)
            return Reply(page, headers=id_lines(context.request_id))
        return json_reply(encode_models(self._cards(context)))

    async def _show_model(self, context: RequestContext) -> Reply:
        """One of them."""
        wanted = context.params["model"]
        cards = self._cards(context)
        for card in cards:
            if card["id"] == wanted and context.dialect is Dialect.ANTHROPIC:
                return Reply(orjson.dumps(anthropic.model_of(card)), headers=id_lines(context.request_id))
            if card["id"] == wanted:
                return json_reply(orjson.dumps(card))
        raise self._intake.not_served(context, wanted, [str(card["id"]) for card in cards])

    def _infos(self, context: RequestContext) -> Sequence[ReplicaInfo]:
        """Return all replicas, but to a tier that asks those alone that do not lead back to it."""
        infos, asker = self._deps.models(), self._intake.asker(context)
        if asker is None:
            return infos
        load = self._deps.dispatcher.load
        back = {seen.info for seen in load()} - {seen.info for seen in load(asker.instance)}
        return [info for info in infos if info not in back]

    def _cards(self, context: RequestContext) -> list[dict[str, object]]:
        cards = model_cards(self._infos(context), self._created_s)
        return [card for card in cards if context.caller.may_use(str(card["id"]))]
