"""/v1/embeddings: calls whose answer is one value."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.media import plain_body, require_json
from router.gateway.whole import collect_output
from router.values.task import Embeddings, Task
from router.wire.openai.embeddings import EmbeddingBody, decode_embeddings, encode_embeddings


class EmbeddingsRoutes:
    """The one handler."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def routes(self) -> list[BaseRoute]:
        handler = self._intake.deferrable(self._embed)
        endpoint = Endpoint("embeddings", handler, self._intake, admits=True, takes=EmbeddingBody)
        return [Route("/v1/embeddings", endpoint, methods=["POST"])]

    async def _embed(self, context: RequestContext) -> Reply:
        require_json(context)
        asked = decode_embeddings(plain_body(context, self._intake.deps.limits.max_body_bytes))
        self._intake.require_model(context, asked.request.model, Task.EMBED)
        answer, prompt_tokens = await self._intake.start(context, asked.request)
        vectors, tokens = await collect_output(answer.chunks, prompt_tokens, Embeddings)
        body = encode_embeddings(answer.route.variant, vectors, asked.encoding, tokens)
        return Reply(body, headers=self._intake.reply_headers(context, answer))
