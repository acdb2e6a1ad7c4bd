"""/v1/deferred."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.jobs.bodies import encode, encode_list, page_in
from router.gateway.jobs.deferral import told
from router.gateway.jobs.query import query_of
from router.jobs.jobs import Jobs
from router.jobs.objects import deferred_object


class DeferredRoutes:
    """The handlers of deferred requests: each caller sees its own."""

    def __init__(self, intake: Intake, jobs: Jobs) -> None:
        self._intake = intake
        self._jobs = jobs

    def routes(self) -> list[BaseRoute]:
        one = "/v1/deferred/{deferred_id}"
        return [
            Route("/v1/deferred", Endpoint("deferred_list", self._list, self._intake), methods=["GET"]),
            Route(one, Endpoint("deferred", self._show, self._intake), methods=["GET"]),
            Route(one, Endpoint("deferred_delete", self._delete, self._intake), methods=["DELETE"]),
        ]

    async def _list(self, context: RequestContext) -> Reply:
        """The caller's deferred requests, page by page."""
        query = query_of(context, {"after", "limit", "order"})
        found, more = await self._jobs.list_deferred(context.caller.digest, page_in(query, default=20, most=100))
        return json_reply(encode_list([deferred_object(deferred) for deferred in found], more=more))

    async def _show(self, context: RequestContext) -> Reply:
        """A deferred request: 202 while it waits, then 200 with the reply that it would have had."""
        return told(await self._jobs.deferred(context.caller.digest, context.params["deferred_id"]))

    async def _delete(self, context: RequestContext) -> Reply:
        """Forget a deferred request; one that waits is not answered any more."""
        deferred_id = context.params["deferred_id"]
        await self._jobs.forget_deferred(context.caller.digest, deferred_id)
        return json_reply(encode({"id": deferred_id, "object": "deferred", "deleted": True}))
