"""Which replicas answer on this device: local models as configured, and the rungs of the upstream.

A change of configuration never drops a request: new models are ready before the router sees them, and a model that
goes away leaves the router first and is closed when its last answer is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import structlog

from edge_agent.config import LocalModels
from edge_agent.generate.turn import Turn
from edge_agent.serving.replica import LocalModel, LocalReplica
from router.base.errors import ConfigError, OverspillError
from router.base.timers import end
from router.values.replica import Replica

log = structlog.get_logger("edge_agent")

_RETIRE_AFTER_S = 600.0
_RETIRE_LOOK_S = 0.2

Describe = Callable[[LocalModels], list[LocalModel]]


@dataclass(frozen=True, slots=True)
class _Place:
    """A replica and everything it was made from: equal places are one replica."""

    key: tuple[object, ...]
    replica: LocalReplica


class Lineup:
    """Owns the local replicas. Use as `async with`.

    Args:
        describe: from settings to models; raises for settings that cannot be served.
        publish: called with the local replicas, best first, after each change.
    """

    def __init__(self, describe: Describe, publish: Callable[[Sequence[Replica]], None]) -> None:
        self._describe = describe
        self._publish = publish
        self._turn = Turn()
        self._places: list[_Place] = []
        self._retiring: dict[asyncio.Task[None], LocalReplica] = {}

    async def __aenter__(self) -> Lineup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        retiring = dict(self._retiring)
        await end(*retiring)
        await asyncio.gather(*(replica.close() for replica in (*self.replicas, *retiring.values())))

    @property
    def replicas(self) -> list[LocalReplica]:
        return [place.replica for place in self._places]

    async def apply(self, settings: LocalModels) -> None:
        """Serve what `settings` says from now on.

        Raises:
            ConfigError: it cannot be served; everything stays as it was.
        """
        known = {place.key: place for place in self._places}
        wanted: list[_Place] = []
        fresh: list[_Place] = []
        try:
            for model in await asyncio.to_thread(self._describe, settings):
                key = (model.info, model.limits, model.queue_limit, model.digest, _how_loaded(settings))
                place = known.get(key)
                if place is None:
                    place = _Place(key, LocalReplica(model, self._turn))
                    fresh.append(place)
                wanted.append(place)
                await asyncio.to_thread(model.codec.warm)
            for place in wanted:
                if place.replica.info.variant in settings.preload:
                    await place.replica.load()
        except BaseException as error:
            closing = [self._retire(place.replica) for place in fresh]
            if not isinstance(error, OverspillError):
                raise  # cancelled: whoever did that need not wait for a load to end
            if closing:
                await asyncio.wait(closing)
            raise ConfigError(f"models: {error.message}", param=error.param or "models") from error
        leaving = [place for place in self._places if place not in wanted]
        self._places = wanted
        self._publish(self.replicas)
        for place in leaving:
            self._retire(place.replica)

    def _retire(self, replica: LocalReplica) -> asyncio.Task[None]:
        task = asyncio.create_task(_retire(replica), name=f"retire {replica.info.variant}")
        self._retiring[task] = replica
        task.add_done_callback(self._retiring.pop)
        return task


def _how_loaded(settings: LocalModels) -> tuple[object, ...]:
    return (
        settings.store,
        settings.catalogue,
        settings.intra_op_threads,
        settings.allow_provider_fallback,
        settings.unload_idle_s,
    )


async def _retire(replica: LocalReplica) -> None:
    """Close a replica that the router no longer knows, when its answers are complete."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _RETIRE_AFTER_S
    try:
        while next(replica.loop.live, None) is not None and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_RETIRE_LOOK_S)
    finally:
        await replica.close()
        log.info("model retired", variant=replica.info.variant)
