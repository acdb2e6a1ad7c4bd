"""/v2/repository: which models a tier has, and loading and unloading them, for its operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import orjson
import structlog
from starlette.routing import BaseRoute, Route

from router.base.errors import Forbidden, InvalidRequest
from router.gateway.endpoint import Endpoint, RequestContext, json_reply
from router.gateway.errors import Reply
from router.gateway.intake import Intake
from router.gateway.media import require_no_form
from router.values.replica import ReplicaInfo
from router.values.repository import ModelState, State
from router.wire.body import decode_json
from router.wire.kserve.call import VERSION

log = structlog.get_logger("router.gateway")


class _Index(msgspec.Struct, frozen=True):
    ready: bool = False


class _Change(msgspec.Struct, frozen=True):
    parameters: dict[str, Any] = {}


_index_decoder = msgspec.json.Decoder(_Index)
_change_decoder = msgspec.json.Decoder(_Change)


class RepositoryRoutes:
    """The handlers of V2's repository extension."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._deps = intake.deps

    def routes(self) -> list[BaseRoute]:
        def page(path: str, name: str, handler: Any, takes: type) -> Route:
            return Route(path, Endpoint(name, handler, self._intake, takes=takes), methods=["POST"])

        return [
            page("/v2/repository/index", "v2 index", self._index, _Index),
            page("/v2/repository/models/{model}/load", "v2 load", self._load, _Change),
            page("/v2/repository/models/{model}/unload", "v2 unload", self._unload, _Change),
        ]

    async def _index(self, context: RequestContext) -> Reply:
        """The models that this tier serves, and those that it could load."""
        require_no_form(context)
        asked = decode_json(_index_decoder, context.body) if context.body else _Index()
        allowed = [state for state in self._states() if context.caller.may_use(state.name)]
        found = [state for state in allowed if not asked.ready or state.state == "READY"]
        return json_reply(orjson.dumps([_entry(state) for state in found]))

    def _states(self) -> list[ModelState]:
        """Return a state for each family and variant: ready where any replica of it can take a request."""
        found: dict[str, ModelState] = {}
        for snapshot in self._deps.dispatcher.load():
            away: State = "LOADING" if snapshot.back_in_s else "UNAVAILABLE"
            for name in (snapshot.info.family, snapshot.info.variant):
                if snapshot.available:
                    found[name] = ModelState(name=name)
                else:
                    found.setdefault(name, ModelState(name=name, state=away, reason=snapshot.why))
        for entry in self._deps.repository.unloaded() if self._deps.repository is not None else ():
            found.setdefault(entry.name, entry)
        families = families_of([snapshot.info for snapshot in self._deps.dispatcher.load()])
        return [
            msgspec.structs.replace(state, variants=families[name]) if name in families else state
            for name, state in found.items()
        ]

    async def _load(self, context: RequestContext) -> Reply:
        """Load a model and serve it when it is ready; for the operator."""
        await self._changed(context, "load")
        return json_reply(b"{}")

    async def _unload(self, context: RequestContext) -> Reply:
        """Take a model out of service, let its answers end, and free it; for the operator."""
        await self._changed(context, "unload")
        return json_reply(b"{}")

    async def _changed(self, context: RequestContext, what: str) -> None:
        _require_operator(context)
        require_no_form(context)
        change = decode_json(_change_decoder, context.body) if context.body else _Change()
        _refuse_parameters(change.parameters)
        repository, name = self._deps.repository, context.params["model"]
        if repository is None:
            raise InvalidRequest(f"this tier cannot {what} models while it runs: change its configuration")
        log.info("repository change asked for", change=what, model=name, request_id=context.request_id)
        await (repository.load(name) if what == "load" else repository.unload(name))


def families_of(infos: Iterable[ReplicaInfo]) -> dict[str, tuple[str, ...]]:
    """Return the variants of each family; one that is called as a variant of it is that."""
    found: dict[str, dict[str, None]] = {}
    for info in infos:
        found.setdefault(info.family, {})[info.variant] = None
    return {family: tuple(variants) for family, variants in found.items() if family not in variants}


def _entry(state: ModelState) -> dict[str, object]:
    """Return an entry of the index; of a family it says more than Triton's, for those who take each model once."""
    told: dict[str, object] = {"name": state.name, "version": VERSION, "state": state.state, "reason": state.reason}
    return {**told, "variants": state.variants} if state.variants else told


def _require_operator(context: RequestContext) -> None:
    """Keep callers from changing what others are served by; without keys, whoever is on this host is the operator.

    Raises:
        Forbidden: the key is a caller's.
    """
    if not context.caller.sees_all:
        raise Forbidden(f"{context.path} changes what everybody is served by: a key of the role `operator` opens it")


def _refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse what would change a model; that the models it needs go with it means nothing here."""
    for name in parameters:
        if name != "unload_dependents":
            raise InvalidRequest(
                f"`parameters.{name[:80]}`: models are loaded as they are configured here: leave it out",
                param=f"parameters.{name[:80]}",
            )
