"""Loading and unloading rungs of this device while it serves, as its operator asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from edge_agent.config import LocalModels
from edge_agent.serving.lineup import Lineup
from models.catalogue.families import Catalogue
from router.base.errors import ConfigError, InvalidRequest, ModelNotFound, Unavailable
from router.values.repository import ModelState
from router.values.task import Task

log = structlog.get_logger("edge_agent")

_RETRY_AFTER_S = 5.0


class LocalRepository:
    """`router.values.repository.Repository` over the lineup.

    What was asked for lies over the configuration until the agent ends, also where the fleet changes that meanwhile.

    Args:
        configured: the models that the configuration in force names.
        elsewhere: variants and families that replicas beyond this device serve.
    """

    def __init__(
        self,
        lineup: Lineup,
        catalogue: Catalogue,
        configured: Callable[[], LocalModels],
        elsewhere: Callable[[], set[str]],
    ) -> None:
        self._lineup = lineup
        self._catalogue = catalogue
        self._configured = configured
        self._elsewhere = elsewhere
        self._changing = asyncio.Lock()
        self._added: frozenset[str] = frozenset()
        self._removed: frozenset[str] = frozenset()

    def effective(self, settings: LocalModels) -> LocalModels:
        """Lay what was loaded and unloaded over a configuration."""
        return _laid(settings, self._added, self._removed)

    def unloaded(self) -> Sequence[ModelState]:
        served = {replica.info.variant for replica in self._lineup.replicas}
        names = [name for name in self._configured().variants if name not in served]
        return [ModelState(name=name, state="UNAVAILABLE", reason="unloaded") for name in names]

    async def load(self, name: str) -> None:
        """See `Repository`. A variant that is not configured is served as one that is, if it was prepared."""
        self._refuse_pipeline(name)
        async with self._changing:
            wanted, before = self._loadable(name), (self._added, self._removed)
            await self._change(self._added | wanted, self._removed - wanted)
            broken = [r for r in self._lineup.replicas if r.info.variant in wanted and not r.loaded]
            if broken:
                why = "; ".join(f"{replica.info.variant}: {replica.problem or 'not loaded'}" for replica in broken)
                await self._change(*before)
                raise Unavailable(f"cannot load `{name}`: {why}", retry_after_s=_RETRY_AFTER_S)

    async def unload(self, name: str) -> None:
        self._refuse_pipeline(name)
        async with self._changing:
            here = {r.info.variant for r in self._lineup.replicas if name in {r.info.variant, r.info.family}}
            if not here:
                if name in self._elsewhere():
                    raise InvalidRequest(f"`{name}` is not served by this device but behind it: unload it there")
                raise ModelNotFound.of(name, [replica.info.variant for replica in self._lineup.replicas])
            await self._change(self._added - here, self._removed | here)

    def _refuse_pipeline(self, name: str) -> None:
        """Raises InvalidRequest for a declared pipeline: the configuration alone says whether it is served."""
        for replica in self._lineup.replicas:
            if name in {replica.info.variant, replica.info.family} and Task.INFER in replica.info.tasks:
                raise InvalidRequest(
                    f"`{name}` is a pipeline, which is served as [[pipelines]] declares it: change that, and restart",
                    param="model",
                )

    async def _change(self, added: frozenset[str], removed: frozenset[str]) -> None:
        """Serve what results; where nothing could serve it, everything stays as it was."""
        try:
            await self._lineup.apply(_laid(self._configured(), added, removed))
        except ConfigError as error:
            raise InvalidRequest(error.message.removeprefix("models: "), param="model") from error
        self._added, self._removed = added, removed

    def _loadable(self, name: str) -> frozenset[str]:
        """Return the variants that a name means."""
        configured = self._configured().variants
        known = {variant.name: family.name for family in self._catalogue for variant in family.variants}
        if name in known:
            return frozenset({name})
        of_family = frozenset(variant for variant in configured if known.get(variant) == name)
        if not of_family:
            raise ModelNotFound.of(name, {*known, *(known[variant] for variant in configured if variant in known)})
        return of_family


def _laid(settings: LocalModels, added: frozenset[str], removed: frozenset[str]) -> LocalModels:
    names = dict.fromkeys([*settings.variants, *sorted(added)])
    variants = tuple(name for name in names if name not in removed)
    preload = tuple(name for name in variants if name in settings.at_start or name in added)
    return msgspec.structs.replace(settings, variants=variants, preload=preload)
