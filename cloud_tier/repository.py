"""Loading and unloading this tier's own engines while it serves, as its operator asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from cloud_tier.replicas import EngineReplica
from router.base.clock import Clock
from router.base.errors import InvalidRequest, ModelNotFound, OverspillError, ReplicaError, Unavailable
from router.values.replica import ReplicaInfo
from router.values.repository import ModelState, State

log = structlog.get_logger("cloud_tier")

_RETRY_AFTER_S = 5.0


class EngineRepository:
    """`router.values.repository.Repository` over the engines that the configuration names.

    Args:
        warm_up: an engine's speed is measured before it serves.
        drain_s: how long answers under way may go on when their engine is unloaded.
        publish: called when what is served has changed.
        elsewhere: the replicas behind this tier.
    """

    def __init__(
        self,
        replicas: Sequence[EngineReplica],
        clock: Clock,
        *,
        warm_up: bool,
        drain_s: float,
        publish: Callable[[], None],
        elsewhere: Callable[[], Sequence[ReplicaInfo]],
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._warm_up = warm_up
        self._drain_s = drain_s
        self._publish = publish
        self._elsewhere = elsewhere
        self._changing = asyncio.Lock()
        self._out: dict[EngineReplica, ModelState] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> list[EngineReplica]:
        """The engines that were not unloaded."""
        return [replica for replica in self._replicas if replica not in self._out]

    def unloaded(self) -> Sequence[ModelState]:
        return list(self._out.values())

    async def load(self, name: str) -> None:
        async with self._changing:
            named = self._named(name)
            for replica in named:
                if replica in self._out:
                    await self._start(replica)

    async def unload(self, name: str) -> None:
        async with self._changing:
            leaving = [replica for replica in self._named(name) if replica not in self._out]
            for replica in leaving:
                self._mark(replica, "UNLOADING", "its answers end")
            self._publish()
            # A caller who leaves changes nothing: what was taken out of service is stopped all the same.
            stops = [asyncio.create_task(self._stop(replica), name="unload") for replica in leaving]
            self._stopping.update(stops)
            await asyncio.shield(asyncio.gather(*stops))

    async def _start(self, replica: EngineReplica) -> None:
        self._mark(replica, "LOADING", "its engine starts")
        try:
            await replica.engine.start()
            if self._warm_up:
                await replica.warm_up(self._clock)
        except BaseException as error:
            self._mark(replica, "UNAVAILABLE", error.message if isinstance(error, OverspillError) else "unloaded")
            await replica.engine.stop()
            if isinstance(error, (OverspillError, ReplicaError)):
                name = replica.info.variant
                raise Unavailable(f"cannot load `{name}`: {error.message}", retry_after_s=_RETRY_AFTER_S) from error
            raise
        del self._out[replica]
        self._publish()
        log.info("engine loaded", engine=replica.info.replica_id)

    async def _stop(self, replica: EngineReplica) -> None:
        try:
            await replica.engine.stop(self._drain_s)
            log.info("engine unloaded", engine=replica.info.replica_id)
        finally:
            self._mark(replica, "UNAVAILABLE", "unloaded")
            task = asyncio.current_task()
            if task is not None:
                self._stopping.discard(task)

    def _mark(self, replica: EngineReplica, state: State, reason: str) -> None:
        self._out[replica] = ModelState(name=replica.info.variant, state=state, reason=reason)

    def _named(self, name: str) -> list[EngineReplica]:
        found = [replica for replica in self._replicas if name in {replica.info.variant, replica.info.family}]
        if found:
            return found
        elsewhere = [info for info in self._elsewhere() if name in {info.variant, info.family}]
        if any(not info.remote for info in elsewhere):
            raise InvalidRequest(f"`{name}` is served as the configuration declares it: change that, and restart")
        if elsewhere:
            raise InvalidRequest(f"`{name}` is not served by an engine of this tier but behind it: change it there")
        raise ModelNotFound.of(name, [replica.info.variant for replica in self._replicas])
