"""KServe V2 over HTTP: server and model metadata, health, statistics, inference, generation."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from router.base.errors import InvalidRequest, OverspillError
from router.gateway.endpoint import Endpoint, RequestContext, StreamReply, json_reply, not_ready
from router.gateway.errors import Reply, render_error
from router.gateway.intake import Intake
from router.gateway.kserve.batch import parts_of, row_of
from router.gateway.kserve.models import Models
from router.gateway.kserve.stream import GenerateStream
from router.gateway.media import plain_body, require_no_form, require_no_page
from router.gateway.parts import Answered, answer_all, answer_one
from router.gateway.tenant_routes import require_monitor
from router.gateway.whole import collect_output
from router.values.task import Embeddings
from router.values.tensors import Signature, Tensors
from router.wire.headers import whole_number
from router.wire.kserve.arrays import array_infer, encode_array_infer
from router.wire.kserve.call import CallInfer, InferCall
from router.wire.kserve.embedding import embed_infer, encode_embed_infer
from router.wire.kserve.generate import GENERATE_BODY, decode_generate, encode_generate
from router.wire.kserve.model import EXTENSIONS, model_config, model_metadata
from router.wire.kserve.reply import InferReply, Row, encode_infer
from router.wire.kserve.request import HEADER_LENGTH, INFER_BODY, RawInfer, read_infer, read_parts
from router.wire.names import DEGRADED
from router.wire.promise import refuse_deferring

_IN_THREAD_BYTES = 16 * 1024  # some milliseconds of work on a small device


class KServeRoutes:
    """The handlers of the open inference protocol."""

    def __init__(self, intake: Intake) -> None:
        self._deps = intake.deps
        self._intake = intake
        self._models = Models(intake)
        self._version = metadata.version("overspill")

    def routes(self) -> list[BaseRoute]:
        def page(path: str, name: str, handler: Any) -> Route:
            return Route(path, Endpoint(name, handler, self._intake), methods=["GET"])

        def inference(path: str, name: str, handler: Any, takes: type) -> Route:
            return Route(path, Endpoint(name, handler, self._intake, admits=True, takes=takes), methods=["POST"])

        found: list[BaseRoute] = [
            page("/v2", "v2 server", self._server),
            page("/v2/health/live", "v2 live", self._live),
            page("/v2/health/ready", "v2 ready", self._ready),
            page("/v2/models/stats", "v2 statistics", self._statistics),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found += [
                page(model, "v2 model", self._show_model),
                page(f"{model}/ready", "v2 model ready", self._model_ready),
                page(f"{model}/config", "v2 model config", self._show_config),
                page(f"{model}/stats", "v2 model statistics", self._statistics),
                inference(f"{model}/infer", "v2 infer", self._infer, INFER_BODY),
                inference(f"{model}/generate", "v2 generate", self._generate, GENERATE_BODY),
                inference(f"{model}/generate_stream", "v2 generate_stream", self._generate_stream, GENERATE_BODY),
            ]
        return found

    async def _server(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """What this server is, and which extensions of V2 it has."""
        body = {"name": "overspill", "version": self._version, "extensions": EXTENSIONS}
        return json_reply(orjson.dumps(body))

    async def _live(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """Whether the process answers at all."""
        return json_reply(b'{"live":true}')

    async def _ready(self, context: RequestContext) -> Reply:
        """Whether a replica could take a request now."""
        refusal = not_ready(self._deps)
        return json_reply(b'{"ready":true}') if refusal is None else render_error(refusal, context.dialect)

    async def _show_model(self, context: RequestContext) -> Reply:
        """What a model takes and returns."""
        return json_reply(orjson.dumps(model_metadata(context.params["model"], self._models.replicas(context))))

    async def _show_config(self, context: RequestContext) -> Reply:
        """A model's configuration, as Triton words it."""
        found = self._models.replicas(context)
        return json_reply(orjson.dumps(model_config(context.params["model"], found, self._models.slots(found))))

    async def _model_ready(self, context: RequestContext) -> Reply:
        """Whether a replica of the model can take a request now."""
        self._models.require_ready(context)
        return json_reply(orjson.dumps({"name": context.params["model"], "ready": True}))

    async def _statistics(self, context: RequestContext) -> Reply:
        """What each model has served since the start, over any API."""
        require_monitor(context)
        return json_reply(orjson.dumps({"model_stats": self._models.statistics(context)}))

    async def _infer(self, context: RequestContext) -> Reply:
        """Answer one prompt, or a batch of them, in one piece; embed texts; run inputs through a pipeline."""
        model = self._models.require(context)
        require_no_form(context)
        refuse_deferring(context.headers)
        body = plain_body(context, self._deps.limits.max_body_bytes)
        header_length = context.headers.get(HEADER_LENGTH)
        signature = self._models.signature(model)
        if signature is not None:
            return await self._run(context, model, body, signature)
        raw = read_infer(body, header_length)
        if self._models.embeds(model):
            return await self._embed(context, model, raw)
        call = raw.to_prompts()
        _refuse_stream(call, "…/generate_stream, /v1/completions, or ModelStreamInfer over gRPC")
        rows, lines = await self._answer(context, call, model)
        return _tensor_reply(encode_infer(model, call, rows), lines)

    async def _embed(self, context: RequestContext, model: str, raw: RawInfer) -> Reply:
        """Turn the texts of a request into vectors."""
        asked = embed_infer(raw)
        answer, prompt_tokens = await self._intake.start(context, asked.request(model))
        vectors, tokens = await collect_output(answer.chunks, prompt_tokens, Embeddings)
        return _tensor_reply(
            encode_embed_infer(model, asked, vectors, tokens), self._intake.reply_headers(context, answer)
        )

    async def _run(self, context: RequestContext, model: str, body: bytes, signature: Signature) -> Reply:
        """Send the tensors of a request through a pipeline."""
        header_length = context.headers.get(HEADER_LENGTH)
        numbers = len(body) if header_length is None else whole_number(header_length, len(body)) or 0

        def read() -> CallInfer:
            return array_infer(read_parts(body, header_length), signature)

        beside, caller = self._intake.beside, context.caller.digest
        asked = await beside.run(caller, numbers, read, from_size=_IN_THREAD_BYTES)
        answer, rows = await self._intake.start(context, asked.request(model))
        tensors, _ = await collect_output(answer.chunks, rows, Tensors)
        written = sum(len(tensor.data) for tensor in tensors.tensors) if any(not raw for _, raw in asked.outputs) else 0
        encoded = partial(encode_array_infer, model, asked, tensors)
        reply = await beside.run(caller, written, encoded, from_size=_IN_THREAD_BYTES)
        return _tensor_reply(reply, self._intake.reply_headers(context, answer))

    async def _answer(
        self, context: RequestContext, call: InferCall, model: str
    ) -> tuple[list[Row], list[tuple[str, str]]]:
        """Return a row for each prompt, and headers of the reply: those of the first that was answered.

        Raises:
            OverspillError: none was answered.
        """
        parts = parts_of(call, model)
        if len(parts) == 1:
            found: list[Answered | OverspillError] = [await answer_one(self._intake, context, parts[0].request)]
        else:
            found = await answer_all(self._intake, context, parts)
        answered = [one for one in found if isinstance(one, Answered)]
        if not answered:
            raise next(one for one in found if isinstance(one, OverspillError))
        lines = self._intake.reply_headers(context, answered[0].answer)
        if any(one.answer.route.degraded for one in answered):
            lines = [(name, "true" if name == DEGRADED else value) for name, value in lines]
        return [row_of(one) if isinstance(one, Answered) else Row.failed(one.message) for one in found], lines

    async def _generate(self, context: RequestContext) -> Reply:
        """Answer a prompt in one piece; plain JSON, Triton's extension."""
        model, call = self._asked(context)
        _refuse_stream(call, "…/generate_stream")
        rows, lines = await self._answer(context, call, model)
        return Reply(encode_generate(model, call, rows[0]), headers=lines)

    async def _generate_stream(self, context: RequestContext) -> Reply | StreamReply:
        """Answer a prompt piece by piece, as server-sent events; Triton's extension."""
        model, call = self._asked(context)
        answer, prompt_tokens = await self._intake.start(context, parts_of(call, model)[0].request)
        stream = GenerateStream(
            model, call, answer, prompt_tokens, request_id=context.request_id, metrics=self._intake.metrics
        )
        first = await stream.first()
        return StreamReply(self._intake.reply_headers(context, answer), first, stream)

    def _asked(self, context: RequestContext) -> tuple[str, InferCall]:
        model = self._models.require(context)
        require_no_page(context)
        refuse_deferring(context.headers)
        return model, decode_generate(plain_body(context, self._deps.limits.max_body_bytes))


def _tensor_reply(reply: InferReply, lines: list[tuple[str, str]]) -> Reply:
    if reply.header_length is None:
        return Reply(reply.body, headers=lines)
    lines.append((HEADER_LENGTH, str(reply.header_length)))
    return Reply(reply.body, headers=lines, media_type="application/octet-stream")


def _refuse_stream(call: InferCall, remedy: str) -> None:
    if call.stream:
        raise InvalidRequest(
            f"`parameters.stream`: this is answered in one piece: stream from {remedy}", param="parameters.stream"
        )
