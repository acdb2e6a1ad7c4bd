"""The HTTP surface of a tier: OpenAI, Anthropic, KServe V2 and operations on one ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.base.build import build_of
from router.base.errors import InvalidRequest, OverspillError
from router.gateway.auth import Authentication
from router.gateway.check import check_origins
from router.gateway.deps import (
    Dispatch,
    GatewayDeps,
    GatewayLimits,
    PromptCounter,
    Telemetry,
)
from router.gateway.direct import Direct
from router.gateway.embeddings_routes import EmbeddingsRoutes
from router.gateway.errors import NoSuchPage, WrongMethod, dialect_of, render_error
from router.gateway.http.cors import Origins
from router.gateway.http.front import Front
from router.gateway.intake import Intake
from router.gateway.jobs.off import JobsOff
from router.gateway.kserve.repository import RepositoryRoutes
from router.gateway.kserve.routes import KServeRoutes
from router.gateway.lost_paths import remedy
from router.gateway.messages_routes import MessagesRoutes
from router.gateway.metrics import GatewayMetrics
from router.gateway.openai_routes import OpenAIRoutes
from router.gateway.ops_routes import OpsRoutes
from router.gateway.passed_routes import PassedRoutes
from router.gateway.reference.routes import ReferenceRoutes
from router.gateway.responses_routes import ResponsesRoutes
from router.gateway.tenant_routes import TenantRoutes
from router.gateway.token_routes import TokenRoutes
from router.wire.headers import lower_case, reply_id
from router.wire.names import REQUEST_ID

__all__ = ["Dispatch", "GatewayDeps", "GatewayLimits", "PromptCounter", "Telemetry", "create_app"]

log = structlog.get_logger("router.gateway")


class Gateway:
    """The ASGI application of a tier.

    Attributes:
        api: the framework's application, with every route.
    """

    def __init__(self, api: FastAPI, front: ASGIApp) -> None:
        self.api = api
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)


def create_app(deps: GatewayDeps) -> Gateway:
    """Build the gateway of a tier.

    The routes are bare ASGI endpoints, because a hot path has no use for dependency injection and response models.
    One application takes one metrics registry: build it once.

    Raises:
        ConfigError: `cors.allow_origins` would let any web page use a tier without keys.
    """
    check_origins(deps.cors, keyless=deps.tenancy.directory.open)
    api = FastAPI(title=f"Overspill {deps.tier}", docs_url=None, redoc_url=None, openapi_url=None)
    build = build_of()
    if build.changed:
        log.warning("the router was compiled from other sources", changed=build.changed, remedy="make compiled")
    intake = Intake(deps, GatewayMetrics(deps.telemetry.registry))
    groups: Sequence[_Routes] = (
        OpenAIRoutes(intake),
        TokenRoutes(intake),
        ResponsesRoutes(intake),
        MessagesRoutes(intake),
        EmbeddingsRoutes(intake),
        PassedRoutes(intake),
        KServeRoutes(intake),
        RepositoryRoutes(intake),
        OpsRoutes(intake),
        TenantRoutes(intake),
        *_job_routes(intake),
        ReferenceRoutes(intake, api.router),
    )
    for group in groups:
        api.router.routes.extend(group.routes())
    api.router.redirect_slashes = False  # `Front` sees to them
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(Exception, _crash)
    known = Authentication(Direct(api.router.routes, api), tenancy=deps.tenancy)
    return Gateway(api, Front(known, origins=Origins(deps.cors, local_pages=deps.local_pages)))


class _Routes(Protocol):
    def routes(self) -> list[BaseRoute]: ...


def _job_routes(intake: Intake) -> Sequence[_Routes]:
    jobs = intake.deps.jobs
    if jobs is None:
        return (JobsOff(intake),)
    # Only a tier that keeps jobs pays for SQLAlchemy.
    from router.gateway.jobs.batch_routes import BatchRoutes  # noqa: PLC0415
    from router.gateway.jobs.deferred_routes import DeferredRoutes  # noqa: PLC0415
    from router.gateway.jobs.file_routes import FileRoutes  # noqa: PLC0415
    from router.jobs.metrics import JobMetrics  # noqa: PLC0415

    intake.deps.telemetry.registry.register(JobMetrics(jobs))
    return (FileRoutes(intake, jobs), BatchRoutes(intake, jobs), DeferredRoutes(intake, jobs))


def _http_error(request: Request, error: Exception) -> Response:
    """Errors that routing itself raises: no such path, no such method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    where = f"{request.method} {request.url.path[:200]}"
    extra = dict(getattr(error, "headers", None) or {})
    known: dict[int, OverspillError] = {
        404: NoSuchPage(f"{where}: no such path; {remedy(request.url.path, _paths(request))}"),
        405: WrongMethod(f"{where}: this path takes {extra.get('Allow', 'other methods')}"),
    }
    detail = str(getattr(error, "detail", "")) or f"{where}: HTTP {status}"
    found = known.get(status) or (InvalidRequest(detail) if status < 500 else OverspillError(detail))
    return _reply(found, request, status, extra)


def _paths(request: Request) -> list[str]:
    return [route.path for route in request.app.routes if isinstance(route, Route)]


def _crash(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the server logs it
    """What no endpoint has caught. The caller is not told."""
    return _reply(OverspillError("internal error; the log has the details"), request, 500, {})


def _reply(error: OverspillError, request: Request, status: int, extra: Mapping[str, str]) -> Response:
    headers = lower_case(request.scope["headers"])
    request_id = reply_id(headers)
    reply = render_error(error, dialect_of(request.url.path, headers), request_id)
    lines = {**extra, **dict(reply.headers), REQUEST_ID: request_id}
    return Response(reply.body, status, headers=lines, media_type=reply.media_type)
