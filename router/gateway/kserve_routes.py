"""KServe V2 over HTTP: server and model metadata, health, inference."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route

from router.base.errors import ModelNotFound, Unavailable
from router.gateway.endpoint import Endpoint, RequestContext, draining_or_starting, json_reply
from router.gateway.errors import Reply, render_error
from router.gateway.intake import Intake, collect
from router.gateway.media import plain_body, require_no_form
from router.values.replica import ReplicaInfo
from router.values.request import ApiRequest, TextPrompt
from router.wire import kserve


class KServeRoutes:
    """The handlers of the open inference protocol."""

    def __init__(self, intake: Intake) -> None:
        self._deps = intake.deps
        self._intake = intake
        self._version = metadata.version("overspill")

    def routes(self) -> list[BaseRoute]:
        def endpoint(name: str, handler: Any) -> Endpoint:
            return Endpoint(name, handler, self._intake)

        show, ready = endpoint("v2 model", self._show_model), endpoint("v2 model ready", self._model_ready)
        infer = Endpoint("v2 infer", self._infer, self._intake, admits=True, takes=kserve.INFER_BODY)
        return [
            Route("/v2", endpoint("v2 server", self._server), methods=["GET"]),
            Route("/v2/health/live", endpoint("v2 live", self._live), methods=["GET"]),
            Route("/v2/health/ready", endpoint("v2 ready", self._ready), methods=["GET"]),
            Route("/v2/models/{model}", show, methods=["GET"]),
            Route("/v2/models/{model}/versions/{version}", show, methods=["GET"]),
            Route("/v2/models/{model}/ready", ready, methods=["GET"]),
            Route("/v2/models/{model}/versions/{version}/ready", ready, methods=["GET"]),
            Route("/v2/models/{model}/infer", infer, methods=["POST"]),
            Route("/v2/models/{model}/versions/{version}/infer", infer, methods=["POST"]),
        ]

    async def _server(self, context: RequestContext) -> Reply:  # noqa: ARG002
        body = {"name": "overspill", "version": self._version, "extensions": ["binary_tensor_data"]}
        return json_reply(orjson.dumps(body))

    async def _live(self, context: RequestContext) -> Reply:  # noqa: ARG002
        return json_reply(b'{"live":true}')

    async def _ready(self, context: RequestContext) -> Reply:
        refusal = draining_or_starting(self._deps)
        return json_reply(b'{"ready":true}') if refusal is None else render_error(refusal, context.dialect)

    async def _show_model(self, context: RequestContext) -> Reply:
        name = context.params["model"]
        return json_reply(orjson.dumps(kserve.model_metadata(name, self._replicas(context))))

    async def _model_ready(self, context: RequestContext) -> Reply:
        wanted = {info.replica_id for info in self._replicas(context)}
        name = context.params["model"]
        refusal = draining_or_starting(self._deps)
        if refusal is not None:
            raise refusal
        snapshots = [s for s in self._deps.dispatcher.load() if s.info.replica_id in wanted]
        if not any(snapshot.available for snapshot in snapshots):
            why = "; ".join(dict.fromkeys(s.why for s in snapshots if s.why)) or "no replica is available"
            raise Unavailable(f"`{name}` is not ready: {why}", retry_after_s=self._deps.limits.retry_after_s)
        return json_reply(orjson.dumps({"name": name, "ready": True}))

    def _replicas(self, context: RequestContext) -> list[ReplicaInfo]:
        """Return the replicas of the model in the path.

        Raises:
            ModelNotFound: no such model, or no such version of it.
            Unavailable: no such model here, and an upstream that might serve it was never reached.
        """
        name = context.params["model"]
        replicas = self._deps.models()
        found = [info for info in replicas if name in {info.family, info.variant}]
        if not found:
            known = {n for info in replicas for n in (info.family, info.variant)}
            raise self._intake.not_served(context, name, known)
        _refuse_other_versions(context)
        return found

    async def _infer(self, context: RequestContext) -> Reply:
        self._intake.require_model(context, context.params["model"])
        _refuse_other_versions(context)
        require_no_form(context)
        body = plain_body(context, self._deps.limits.max_body_bytes)
        call = kserve.decode_infer(body, context.headers.get(kserve.HEADER_LENGTH))
        answer, prompt_tokens = await self._intake.start(
            context,
            ApiRequest(context.params["model"], TextPrompt(call.text), call.sampling, deadline_s=call.deadline_s),
        )
        whole = await collect(answer.chunks, prompt_tokens)
        reply = kserve.encode_infer(context.params["model"], call, whole.text, whole.finish_reason, whole.usage)
        lines = self._intake.reply_headers(context, answer)
        if reply.header_length is None:
            return Reply(reply.body, headers=lines)
        lines.append((kserve.HEADER_LENGTH, str(reply.header_length)))
        return Reply(reply.body, headers=lines, media_type="application/octet-stream")


def _refuse_other_versions(context: RequestContext) -> None:
    name, version = context.params["model"], context.params.get("version", kserve.VERSION)
    if version != kserve.VERSION:
        raise ModelNotFound(f"`{name}` has version {kserve.VERSION} only, not `{version[:40]}`", param="version")
