"""What a tier without a folder for jobs says of them."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from router.gateway.endpoint import Endpoint, RequestContext
from router.gateway.errors import NoSuchPage, Reply
from router.gateway.intake import Intake

_ROOTS = ("/v1/files", "/v1/batches", "/v1/deferred")
_PATHS = tuple(path for root in _ROOTS for path in (root, f"{root}/{{rest:path}}"))


class JobsOff:
    """The same paths, and how to switch them on."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def routes(self) -> list[BaseRoute]:
        endpoint = Endpoint("jobs_off", self._refuse, self._intake, read=_unread)
        return [Route(path, endpoint, methods=["GET", "POST", "DELETE"]) for path in _PATHS]

    async def _refuse(self, context: RequestContext) -> Reply:
        """Off on this tier: `jobs.dir` names no folder."""
        raise NoSuchPage(
            f"{context.path[:80]}: this tier keeps no files, batches or deferred requests: its operator has to name a "
            "folder with `jobs.dir`"
        )


async def _unread(*_: object) -> None:
    """A body that nobody needs."""
