"""The HTTP surface of a tier: OpenAI, KServe V2 and operations on one ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.base.errors import InvalidRequest, OverspillError
from router.gateway.auth import Authentication
from router.gateway.deps import (
    Dispatch,
    GatewayDeps,
    GatewayLimits,
    PromptCounter,
    Telemetry,
)
from router.gateway.errors import NoSuchPage, WrongMethod, dialect_of, render_error
from router.gateway.intake import Intake
from router.gateway.kserve_routes import KServeRoutes
from router.gateway.metrics import GatewayMetrics
from router.gateway.openai_routes import OpenAIRoutes
from router.gateway.ops_routes import OpsRoutes

__all__ = ["Dispatch", "GatewayDeps", "GatewayLimits", "PromptCounter", "Telemetry", "create_app"]


def create_app(deps: GatewayDeps) -> FastAPI:
    """Build the gateway of a tier.

    The routes are bare ASGI endpoints, because a hot path has no use for dependency injection and response models.
    One application takes one metrics registry: build it once.
    """
    app = FastAPI(title=f"Overspill {deps.tier}", docs_url=None, redoc_url=None, openapi_url=None)
    intake = Intake(deps, GatewayMetrics(deps.telemetry.registry))
    for group in (OpenAIRoutes(intake), KServeRoutes(intake), OpsRoutes(intake)):
        app.router.routes.extend(group.routes())
    app.add_middleware(Authentication, api_keys=deps.api_keys, max_priority=deps.max_priority)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _crash)
    return app


def _http_error(request: Request, error: Exception) -> Response:
    """Errors that routing itself raises: no such path, no such method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    where = f"{request.method} {request.url.path[:200]}"
    extra = dict(getattr(error, "headers", None) or {})
    known: dict[int, OverspillError] = {
        404: NoSuchPage(f"{where}: no such path; the APIs are below /v1 and /v2"),
        405: WrongMethod(f"{where}: this path takes {extra.get('Allow', 'other methods')}"),
    }
    detail = str(getattr(error, "detail", "")) or f"{where}: HTTP {status}"
    found = known.get(status) or (InvalidRequest(detail) if status < 500 else OverspillError(detail))
    reply = render_error(found, dialect_of(request.url.path))
    return Response(reply.body, status, headers={**extra, **dict(reply.headers)}, media_type=reply.media_type)


def _crash(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the server logs it with its trace
    """What no endpoint has caught. The caller is not told."""
    reply = render_error(OverspillError("internal error; the log has the details"), dialect_of(request.url.path))
    return Response(reply.body, reply.status, headers=dict(reply.headers), media_type=reply.media_type)
