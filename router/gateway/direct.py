"""The shortest way from a connection to an endpoint: paths that take requests to models are looked up, not searched."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.gateway.endpoint import Endpoint


class Direct:
    """Hands requests for a known path to its endpoint, and everything else to the framework.

    A framework's routing and its layers cost a request more than this tier's own decision about it. Endpoints need none
    of it: they answer their own errors.

    Args:
        routes: of these, the ones that take POST at a path without parameters go the short way.
        rest: the framework's application, which knows all of them.
    """

    def __init__(self, routes: Iterable[BaseRoute], rest: ASGIApp) -> None:
        self._rest = rest
        self._endpoints = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route, Route) and isinstance(route.endpoint, Endpoint)
            if "POST" in (route.methods or ()) and "{" not in route.path
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None:
                return endpoint(scope, receive, send)
        return self._rest(scope, receive, send)
