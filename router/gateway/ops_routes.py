"""/health, /ping, /version, /metrics, /v1/scale, /v1/status, /v1/decisions/{request_id}."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from prometheus_client.exposition import choose_encoder
from starlette.routing import BaseRoute, Route

from router.base.extras import installed
from router.decisions.tenant_view import without_addresses
from router.gateway.endpoint import Endpoint, RequestContext, json_reply, not_ready
from router.gateway.errors import NoSuchPage, Reply, render_error
from router.gateway.intake import Intake
from router.gateway.tenant_routes import require_monitor
from router.tenants.tenant import Role
from router.values.status import TierStatus, encode
from router.wire import load as wire_load
from router.wire.names import REACH
from router.wire.reach import encode_reach

_READINESS = ("/health/ready", "/health", "/ping")


class OpsRoutes:
    """The handlers that operators, probes and the tier below use."""

    def __init__(self, intake: Intake) -> None:
        self._deps = intake.deps
        self._intake = intake
        self._began_s = intake.deps.clock.now_s()

    def routes(self) -> list[BaseRoute]:
        def endpoint(name: str, handler: Any) -> Endpoint:
            return Endpoint(name, handler, self._intake)

        return [
            Route("/health/live", endpoint("live", self._live), methods=["GET"]),
            # The first is Overspill's own; the others are what clients of vLLM and of SageMaker look at.
            *(Route(path, endpoint("ready", self._ready), methods=["GET"]) for path in _READINESS),
            Route("/version", endpoint("version", self._show_version), methods=["GET"]),
            Route("/metrics", endpoint("metrics", self._show_metrics), methods=["GET"]),
            Route("/v1/status", endpoint("status", self._status), methods=["GET"]),
            Route("/v1/decisions/{request_id:path}", endpoint("decision", self._decision), methods=["GET"]),
            *(Route(path, endpoint("scale", self._scale), methods=["GET"]) for path in self._scale_paths()),
        ]

    def _scale_paths(self) -> tuple[str, ...]:
        return ("/v1/scale", "/v1/scale/{model:path}") if self._deps.scale is not None else ()

    async def _live(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """Whether the process answers at all."""
        return json_reply(b'{"status":"live"}')

    async def _ready(self, context: RequestContext) -> Reply:
        """Readiness, always with the load report: the tier below polls this page."""
        asker = self._intake.asker(context)
        headers = [(wire_load.HEADER, wire_load.encode_orca(self._intake.load(context, asker)))]
        if asker is not None:
            headers.append((REACH, encode_reach(self._deps.dispatcher.reach())))
        refusal = not_ready(self._deps, "" if asker is None else asker.instance)
        if refusal is None:
            page: dict[str, object] = {"status": "ready", "tier": self._deps.tier}
            notices = list(self._deps.notices())
            return Reply(orjson.dumps({**page, "notices": notices} if notices else page), headers=headers)
        reply = render_error(refusal, context.dialect)
        reply.headers.extend(headers)
        return reply

    async def _show_version(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """The release that runs here."""
        return json_reply(orjson.dumps({"version": installed("overspill")}))

    async def _show_metrics(self, context: RequestContext) -> Reply:
        """The tier's figures for Prometheus, as OpenMetrics where that is asked for."""
        require_monitor(context)
        encode_page, media_type = choose_encoder(context.headers.get("accept", ""))
        reply = Reply(encode_page(self._deps.telemetry.registry), media_type=media_type)
        reply.headers.append(("vary", "accept"))
        return reply

    async def _status(self, context: RequestContext) -> Reply:
        """Replicas, load, breakers and GPUs: what `overspill cloud status` shows."""
        require_monitor(context)
        deps = self._deps
        why = deps.closed() or deps.dispatcher.readiness().why
        status = TierStatus(
            tier=deps.tier,
            overspill=installed("overspill"),
            ready=not why,
            why=why,
            up_s=round(deps.clock.now_s() - self._began_s, 1),
            in_flight=self._intake.in_flight,
            router=deps.dispatcher.status(),
            notices=(*deps.notices(), *deps.tenancy.notices()),
            gpus=deps.gpus(),
            jobs=None if deps.jobs is None else deps.jobs.status(),
        )
        return json_reply(encode(status))

    async def _scale(self, context: RequestContext) -> Reply:
        """How many replicas of a model there should be, for autoscalers."""
        require_monitor(context)
        model = context.params.get("model")
        told = None if self._deps.scale is None else self._deps.scale(model)
        if told is None:
            raise NoSuchPage(
                f"no replicas are counted for `{(model or 'any model')[:128]}`: `/v1/scale` names those that are",
                param="model",
            )
        return json_reply(orjson.dumps(told))

    async def _decision(self, context: RequestContext) -> Reply:
        """Why a request went where it went."""
        wanted = context.params["request_id"]
        caller = context.caller
        decision = self._deps.dispatcher.explain(wanted, None if caller.role is Role.OPERATOR else caller.digest)
        if decision is None:
            raise NoSuchPage(
                f"no decision is kept for `{wanted[:128]}`: only your own recent ones are; ids are in `x-request-id`",
                param="request_id",
            )
        seen = tuple(row for row in decision.candidates if caller.may_use(row.variant))
        shown = msgspec.structs.replace(decision, candidates=seen)
        if caller.role is Role.CALLER:
            shown = without_addresses(shown)
        return json_reply(orjson.dumps(shown.to_json(), option=orjson.OPT_NON_STR_KEYS))
