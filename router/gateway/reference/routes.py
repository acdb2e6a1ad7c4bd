"""/openapi.json, and /docs, a page of it that needs nothing from elsewhere."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import orjson
from starlette.routing import BaseRoute, Route, Router

from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.reference.openapi import describe
from router.gateway.reference.page import render

_NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class ReferenceRoutes:
    """The handlers that tell what may be asked.

    Args:
        router: whose routes are described.
    """

    def __init__(self, intake: Intake, router: Router) -> None:
        self._intake = intake
        self._router = router

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/openapi.json", Endpoint("openapi", self._show_description, self._intake), methods=["GET"]),
            Route("/docs", Endpoint("docs", self._show_page, self._intake), methods=["GET"]),
        ]

    @cached_property
    def _described(self) -> dict[str, Any]:
        return describe(self._router.routes, self._intake.deps.tier)

    async def _show_description(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """This API as OpenAPI 3.1."""
        return json_reply(orjson.dumps(self._described))

    async def _show_page(self, context: RequestContext) -> Reply:  # noqa: ARG002
        """This API as a page to read."""
        page = render(self._described).encode()
        return Reply(page, headers=[("content-security-policy", _NOTHING_ELSE)], media_type="text/html; charset=utf-8")
