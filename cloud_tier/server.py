"""The cloud tier, from start to end: listen, start engines, serve, drain, stop.

Three phases. *Starting*: the address is taken and health answers, while engines load in processes of their own.
*Serving*. *Draining*, from the first SIGTERM or SIGINT: not ready, new requests are refused with a time to come back,
streams in flight go on for up to `server.drain_s`; then the engines end, and what still streamed ends with an error
event. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import structlog
from prometheus_client import ProcessCollector

from cloud_tier.config import CloudConfig, LimitsConfig
from cloud_tier.engine.protocol import EngineConfig
from cloud_tier.engines.settings import CloudBackend
from cloud_tier.engines.vllm import VllmServer
from cloud_tier.gpu_watch import GpuMetrics, GpuWatch
from cloud_tier.metrics import EngineMetrics, kv_usage, watch_scaling
from cloud_tier.plan import Plan
from cloud_tier.prompts import TierPrompts
from cloud_tier.replicas import EngineReplica, SupervisedEngine
from cloud_tier.repository import EngineRepository
from cloud_tier.scaling.watch import ScaleWatch
from models.catalogue.places import places_in
from models.pipelines.metrics import StageMetrics
from models.pipelines.replica import PipelineReplica
from models.text.chat import PromptEncoder
from router.base import systemd
from router.base.build import build_of
from router.base.clock import Clock, MonotonicClock
from router.base.errors import ReplicaError
from router.base.garbage import collect_while_few_wait
from router.base.loopback import is_loopback
from router.base.timers import end
from router.cache.metrics import open_cache
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.recording import open_recording
from router.gateway.app import Gateway, GatewayDeps, GatewayLimits, create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.embedder import embedder
from router.gateway.jobs.calls import Calls
from router.gateway.listener import allow_open_files, bind
from router.gateway.listeners import Listeners, Listening
from router.gateway.tls.ends import CertificateEnds
from router.jobs.opening import open_jobs
from router.tenants.tenancy import open_tenancy
from router.upstream.servers.foreign import Surroundings
from router.upstream.sources import Sources, backend_sources
from router.values.replica import Replica, ReplicaInfo

log = structlog.get_logger("cloud_tier")

_LAST_WORDS_S = 2.0  # after the engines ended: for error events to reach their callers

EngineFactory = Callable[[EngineConfig, Clock], SupervisedEngine]


class Phase(enum.Enum):
    """Where the tier is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


def torch_engine(config: EngineConfig, clock: Clock) -> SupervisedEngine:
    """The engine of this release: torch in processes of its own."""
    from cloud_tier.engine.torch_engine import TorchEngine  # noqa: PLC0415 - one engine kind is imported, when chosen

    return TorchEngine(config, clock)


class CloudTier:
    """One tier. `run` it once."""

    def __init__(self, plan: Plan, make_engine: EngineFactory = torch_engine, clock: Clock | None = None) -> None:
        """Build every part; nothing runs yet.

        Raises:
            ArtifactError: a tokenizer or chat template is damaged.
            ConfigError: `[telemetry]` needs a library that is missing; `[tls]` names files that are none.
        """
        self._config = plan.config
        self._clock = clock or MonotonicClock()
        self._phase = Phase.STARTING
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        encoders = {spec.info.variant: spec.prompts() for spec in plan.specs}
        self._replicas = [
            EngineReplica(make_engine(spec.engine, self._clock), encoders[spec.info.variant], spec.info)
            for spec in plan.specs
        ]
        self._encoders = [PipelineReplica(served, self._clock) for served in plan.encoders]
        self._recording = open_recording(plan.config.decisions, plan.config.telemetry, "overspill-cloud")
        self._telemetry = self._recording.telemetry
        self._telemetry.registry.register(EngineMetrics(self._replicas))
        self._telemetry.registry.register(StageMetrics(lambda: self._encoders))
        self._gpus = GpuWatch(self._clock)
        self._telemetry.registry.register(GpuMetrics(lambda: self._gpus.readings))
        ProcessCollector(registry=self._telemetry.registry)
        self._telemetry.registry.register(CertificateEnds(plan.config.certificates))
        self._dispatcher = Dispatcher(
            [],
            plan.config.router,
            clock=self._clock,
            telemetry=self._telemetry,
            decisions=self._recording.decisions,
            traces=self._recording.traces,
        )
        self._tenancy = open_tenancy(plan.keys, plan.config.tenants, plan.usage_database, self._clock)
        self._tenancy.watch(self._telemetry.registry)
        hooks = self._dispatcher.source_hooks(self._publish)
        surroundings = Surroundings(self._clock, hooks, places_in(plan.catalogue), plan.renderers, tier="cloud")

        def start(entry: CloudBackend) -> VllmServer | None:
            spec = next((spec for spec in plan.servers if spec.backend is entry), None)
            return None if spec is None else VllmServer(spec, surroundings)

        backends = backend_sources(plan.config.backends, surroundings, start=start)
        self._sources = Sources(backends)
        self.repository = EngineRepository(
            self._replicas,
            self._clock,
            warm_up=plan.config.server.warm_up,
            drain_s=plan.config.server.drain_s,
            publish=self._publish,
            elsewhere=lambda: [replica.info for replica in [*self._encoders, *self._sources.replicas]],
        )
        self.jobs = open_jobs(plan.config.jobs, self._clock, self._dispatcher, plan.config.limits.max_body_bytes)
        self.scale = ScaleWatch(self._dispatcher, plan.config.scaling, self._clock, self._publish)
        watch_scaling(self.scale, self._telemetry)
        self.app = self._gateway(plan, encoders)
        self._listeners = Listeners(self.app, _listening(plan.config), self._telemetry.registry)

    @property
    def phase(self) -> Phase:
        """Where the tier is in its life."""
        return self._phase

    @property
    def replicas(self) -> Sequence[EngineReplica]:
        """One a configured engine."""
        return self._replicas

    def stop(self) -> None:
        """Begin to drain; called again, stop without waiting for streams. Safe as a signal handler of the loop."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def reload_keys(self) -> None:
        """Read the keys file now, rather than when it is next looked at."""
        self._tenancy.directory.ask()

    async def run(self, bound: socket.socket) -> None:
        """Serve on a bound socket until `stop`; return when every process and connection has ended.

        Raises:
            OverspillError: an engine cannot start; names the remedy.
        """
        async with self._beside(), self._listeners.running(bound) as serving:
            stopping = asyncio.create_task(self._stop.wait(), name="cloud-stop")
            starting = asyncio.create_task(self._start_engines(), name="cloud-start")
            watchdog = asyncio.create_task(systemd.watch(), name="cloud-watchdog")
            try:
                await asyncio.wait({starting, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    await self._begin_serving()
                    systemd.notify(systemd.READY)
                    host, port = bound.getsockname()[:2]
                    models = [info.variant for info in self._own]
                    log.info("serving", host=host, port=port, models=models, router=build_of().name)
                    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                starting.cancel()
                await asyncio.gather(starting, stopping, return_exceptions=True)
                await self._drain(serving)
                await end(watchdog)
        log.info("stopped")

    @contextlib.asynccontextmanager
    async def mounted(self) -> AsyncIterator[Gateway]:
        """Serve through `app` inside a server of somebody else's, which drains it before it leaves.

        Raises:
            OverspillError: an engine cannot start; names the remedy.
        """
        async with self._beside():
            try:
                await self._start_engines()
                await self._begin_serving()
                yield self.app
            finally:
                self._phase = Phase.DRAINING
                await self._stop_jobs()
                await self._stop_engines()

    @contextlib.asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """Everything that runs as long as requests may come, but for engines and the listener."""
        recording, jobs = self._recording.running(), self.jobs or contextlib.nullcontext()
        async with recording, self._tenancy, self._dispatcher, self._gpus, self._sources, jobs:
            scaling = asyncio.create_task(self.scale.run(), name="cloud-scaling")
            garbage = asyncio.create_task(
                collect_while_few_wait(lambda: self._dispatcher.waiting), name="cloud-garbage"
            )
            try:
                yield
            finally:
                await end(scaling, garbage)

    def _publish(self) -> None:
        """Tell the router which replicas there are now; engines that start are none yet."""
        if self._phase is not Phase.STARTING:
            self._dispatcher.set_replicas(self.scale.stand_in(self._serving))

    async def _begin_serving(self) -> None:
        self._phase = Phase.SERVING
        self._dispatcher.expect(lambda: self._sources.unreached)
        self._dispatcher.tell_of_waiting(self._sources.wanted)
        self._publish()
        if self.jobs is not None:
            await self.jobs.serve(Calls(self.app.api.router, self._tenancy.directory))

    async def _start_engines(self) -> None:
        """Start all engines side by side, then measure one after the other, so that none is measured under load.

        Raises:
            OverspillError: one cannot start; the others are then stopped by `_drain`.
        """
        for replica in self._replicas:
            log.info("starting engine", engine=replica.info.replica_id)
        starts = [asyncio.create_task(replica.engine.start()) for replica in self._replicas]
        starts += [asyncio.create_task(_loaded(encoder)) for encoder in self._encoders]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        for replica in self._replicas:
            if self._config.server.warm_up:
                try:
                    await replica.warm_up(self._clock)
                except ReplicaError as error:
                    log.warning("warm-up failed", engine=replica.info.replica_id, error=error.message)
            prior = replica.info.prior
            log.info(
                "engine ready",
                engine=replica.info.replica_id,
                context_tokens=replica.info.context_tokens,
                prefill_tokens_per_s=round(prior.prefill_tokens_per_s, 1),
                decode_tokens_per_s=round(prior.decode_tokens_per_s, 1),
                prior=prior.source,
            )

    async def _drain(self, serving: asyncio.Task[None]) -> None:
        """Let streams end, then engines, then connections: in this order every caller hears how its request ended."""
        was_serving = self._phase is Phase.SERVING
        self._phase = Phase.DRAINING
        systemd.notify(systemd.STOPPING)
        await self._stop_jobs()
        if was_serving and not serving.done():
            limit_s = self._config.server.drain_s
            log.info("draining", in_flight=self._listeners.busy, limit_s=limit_s)
            await self._listeners.wait_idle(limit_s, self._clock, self._hurry)
            if self._listeners.busy:
                log.warning("streams cut off", in_flight=self._listeners.busy)
        await self._stop_engines()
        if not serving.done():
            await self._listeners.wait_idle(_LAST_WORDS_S, self._clock, self._hurry)

    async def _stop_jobs(self) -> None:
        """Lines of batches end first: they are run again after the next start."""
        if self.jobs is not None:
            await self.jobs.stop()

    async def _stop_engines(self) -> None:
        self._sources.lose("this tier is shutting down")
        stops = await asyncio.gather(*(r.engine.stop() for r in self._replicas), return_exceptions=True)
        await asyncio.gather(*(encoder.close() for encoder in self._encoders))
        for replica, error in zip(self._replicas, stops, strict=True):
            if isinstance(error, BaseException):
                log.error("engine did not stop cleanly", engine=replica.info.replica_id, exc_info=error)

    def _gateway(self, plan: Plan, encoders: Mapping[str, PromptEncoder]) -> Gateway:
        by_name = {spec.info.family: encoders[spec.info.variant] for spec in reversed(plan.specs)}
        return create_app(
            GatewayDeps(
                dispatcher=self._dispatcher,
                prompts=TierPrompts({**by_name, **encoders}, self._models),
                tier="cloud",
                telemetry=self._telemetry,
                clock=self._clock,
                models=self._models,
                tenancy=self._tenancy,
                embed=embedder(plan.config.cache, self._dispatcher, self._clock),
                cache=open_cache(plan.config.cache, self._clock, self._models, self._telemetry.registry),
                closed=lambda: "" if self._phase is Phase.SERVING else self._phase.value,
                back_in_s=self._back_in_s,
                limits=_limits(plan.config.limits),
                kv_usage=lambda: kv_usage([replica.engine.load() for replica in self._replicas]),
                gpus=lambda: self._gpus.readings,
                cors=plan.config.cors,
                media=plan.config.media,
                repository=self.repository,
                local_pages=is_loopback(plan.config.server.host),
                scale=self.scale.report,
                jobs=self.jobs,
            )
        )

    @property
    def _own(self) -> list[ReplicaInfo]:
        """What this tier computes itself."""
        return [*(replica.info for replica in self._replicas), *(encoder.info for encoder in self._encoders)]

    @property
    def _serving(self) -> list[Replica]:
        """What answers: engines that the operator has not unloaded, encoders, and backends."""
        return [*self.repository.serving, *self._encoders, *self._sources.replicas]

    def _models(self) -> list[ReplicaInfo]:
        infos = [replica.info for replica in self._serving]
        return infos + [info for info in self.scale.absent() if info not in infos]

    def ready(self) -> tuple[bool, str]:
        """Whether a replica could take a request, or one is waited for; and if not, why."""
        if self._phase is not Phase.SERVING:
            return False, self._phase.value
        readiness = self._dispatcher.readiness()
        return readiness.ready, readiness.why

    def _back_in_s(self) -> float:
        """Seconds until the first engine should serve again, 0 where that is not known."""
        replicas = [*self._replicas, *self._sources.replicas]
        return min((s for replica in replicas if (s := replica.snapshot().back_in_s) > 0), default=0.0)


async def _loaded(encoder: PipelineReplica) -> None:
    """Load an encoder before the tier serves.

    Raises:
        ReplicaUnreachable: it cannot be loaded; says why.
    """
    log.info("starting encoder", model=encoder.info.variant)
    await encoder.load()


async def serve(plan: Plan, make_engine: EngineFactory = torch_engine) -> None:
    """Run the tier until SIGTERM or SIGINT has drained it.

    Raises:
        OverspillError: the address is taken, or an engine cannot start.
    """
    allow_open_files(_connection_limits(plan.config.limits))
    bound = bind(plan.config.server.host, plan.config.server.port, "server")
    with contextlib.closing(bound):
        tier = CloudTier(plan, make_engine)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, tier.stop)
        loop.add_signal_handler(signal.SIGHUP, tier.reload_keys)
        await tier.run(bound)


def _connection_limits(limits: LimitsConfig) -> ConnectionLimits:
    return ConnectionLimits(limits.header_timeout_s, limits.keep_alive_s, limits.max_connections)


def _listening(config: CloudConfig) -> Listening:
    address = config.server.host, config.server.port
    return Listening(address, _connection_limits(config.limits), _limits(config.limits), config.grpc, config.tls)


def _limits(limits: LimitsConfig) -> GatewayLimits:
    return GatewayLimits(
        max_body_bytes=limits.max_body_bytes,
        body_timeout_s=limits.body_timeout_s,
        max_requests=limits.max_requests,
        send_stall_s=limits.send_stall_s,
    )
