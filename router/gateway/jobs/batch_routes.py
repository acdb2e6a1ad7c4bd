"""/v1/batches."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from router.base.errors import Forbidden, InvalidRequest
from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.jobs.bodies import CreateBatch, decode_create_batch, encode, encode_list, page_in
from router.gateway.jobs.query import query_of
from router.gateway.media import plain_body, require_json
from router.jobs.jobs import Jobs
from router.jobs.objects import batch_object
from router.tenants.tenant import Role
from router.values.request import Objective
from router.wire import headers as wire_headers
from router.wire import names as wire_names
from router.wire.names import CACHE_SALT, LOCALITY, MIN_QUALITY, REQUEST_NAMES, SESSION, SHORTEN, refuse_query
from router.wire.promise import parse_objective

_HOLD_FOR_LINES = (LOCALITY, MIN_QUALITY, SESSION, SHORTEN, CACHE_SALT)
_BETWEEN_TIERS = frozenset({wire_names.HOPS, wire_names.INSTANCE, wire_names.DEMAND, wire_names.ATTEMPTS_LEFT})


class BatchRoutes:
    """The handlers of batches: each caller sees its own."""

    def __init__(self, intake: Intake, jobs: Jobs) -> None:
        self._intake = intake
        self._jobs = jobs

    def routes(self) -> list[BaseRoute]:
        one = "/v1/batches/{batch_id}"
        create = Endpoint("batches_create", self._create, self._intake, takes=CreateBatch)
        return [
            Route("/v1/batches", create, methods=["POST"]),
            Route("/v1/batches", Endpoint("batches", self._list, self._intake), methods=["GET"]),
            Route(one, Endpoint("batch", self._show, self._intake), methods=["GET"]),
            Route(f"{one}/cancel", Endpoint("batch_cancel", self._cancel, self._intake), methods=["POST"]),
        ]

    async def _create(self, context: RequestContext) -> Reply:
        """Run every line of a file in the slack of the tier."""
        require_json(context)
        refuse_query(context.query)
        asked = decode_create_batch(plain_body(context, self._intake.deps.limits.max_body_bytes))
        kept = asked.output_expires_after
        batch = await self._jobs.create_batch(
            context.caller.digest,
            asked.input_file_id,
            asked.endpoint,
            asked.completion_window,
            labels=asked.metadata or {},
            headers=line_headers(context.headers),
            keep_output_s=None if kept is None else kept.seconds,
        )
        return json_reply(encode(batch_object(batch)))

    async def _list(self, context: RequestContext) -> Reply:
        """The caller's batches, page by page; with `all=true` everybody's, for an operator."""
        query = query_of(context, {"after", "limit", "all"})
        page = page_in(query, default=20, most=100)
        if query.get("all", "false") != "true":
            found, more = await self._jobs.list_batches(context.caller.digest, page)
            return json_reply(encode_list([batch_object(batch) for batch in found], more=more))
        if not context.caller.sees_all:
            raise Forbidden("`all=true` lists the batches of all tenants: a key of the role `operator` may")
        found, more = await self._jobs.list_batches(None, page)
        names = {tenant.digest: tenant.name for tenant in self._intake.deps.tenancy.directory.tenants.values()}
        told = [{**batch_object(batch), "tenant": names.get(batch.owner, "")} for batch in found]
        return json_reply(encode_list(told, more=more))

    async def _show(self, context: RequestContext) -> Reply:
        """How far a batch is."""
        batch = await self._jobs.batch(_whose(context), context.params["batch_id"])
        return json_reply(encode(batch_object(batch)))

    async def _cancel(self, context: RequestContext) -> Reply:
        """Cancel a batch; what was answered is kept."""
        batch = await self._jobs.cancel_batch(_whose(context), context.params["batch_id"])
        return json_reply(encode(batch_object(batch)))


def _whose(context: RequestContext) -> str | None:
    """Return whose batch it has to be, None for an operator: anybody's."""
    return None if context.caller.role is Role.OPERATOR else context.caller.digest


def line_headers(headers: dict[str, str]) -> list[tuple[str, str]]:
    """Return what holds for each line of a batch: where it may run, and how well.

    Raises:
        InvalidRequest: a header of ours is wrong, or promises times, which no line of a batch has.
    """
    parse_objective(headers, Objective())
    wire_headers.cache_salt(headers)
    for name in (*REQUEST_NAMES, *wire_names.TTFT_NAMES, *wire_names.TPOT_NAMES):
        if name in headers and name not in _HOLD_FOR_LINES and name not in _BETWEEN_TIERS:
            raise InvalidRequest(
                f"`{name}`: lines of a batch have no times and no priority of their own, only `completion_window`: "
                f"leave it out (held for each line: {', '.join(_HOLD_FOR_LINES)})",
                param=name,
            )
    return [(name, headers[name]) for name in _HOLD_FOR_LINES if name in headers]
