"""/v1/usage, and what a tenant's key does not open."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec
from starlette.routing import BaseRoute, Route

from router.base.errors import Forbidden, InvalidRequest
from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.tenants.used import day_of


class TenantRoutes:
    """The handlers for tenants, of what is theirs."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._tenancy = intake.deps.tenancy

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/usage", Endpoint("usage", self._usage, self._intake), methods=["GET"])]

    async def _usage(self, context: RequestContext) -> Reply:
        """What was used by tenant, device, model and day: a tenant's own, or everybody's for an operator."""
        query = parse_qs(context.query.decode("latin-1"), max_num_fields=16)
        since, until = _day(query, "since", "0001-01-01"), _day(query, "until", "9999-12-31")
        rows = await self._tenancy.ledger.report(since, until)
        caller = context.caller
        if caller.tenant is not None and not caller.sees_all:
            rows = [row for row in rows if row.key.tenant == caller.tenant.name]
        return json_reply(msgspec.json.encode({"rows": rows}))


def require_monitor(context: RequestContext) -> None:
    """Keep what tells of everybody from those who are one of many.

    Raises:
        Forbidden: the key is a tenant's own.
    """
    if not context.caller.may_monitor:
        raise Forbidden(
            f"{context.path} tells of all tenants together: a key of the role `monitor` or `operator` opens it"
        )


def _day(query: dict[str, list[str]], name: str, default: str) -> str:
    given = query.get(name, [default])[-1]
    try:
        return day_of(given)
    except ValueError as error:
        raise InvalidRequest(f"`{name}`: {error}", param=name) from None
