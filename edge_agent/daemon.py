"""The agent in three phases: startup, serve, drain.

Startup goes from the configuration to the profile, the gateway, the models and the fleet; the address is taken and
answers `503 starting` before a model is loaded. A first SIGTERM or SIGINT drains: new requests are refused with the
time to come back, streams in flight go on up to a deadline. Then the models end, and with them what still streams,
with an error event; the listener is left last. A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import structlog

from edge_agent.config import EdgeConfig, LocalModels, key_sources
from edge_agent.device.health import DeviceHealth, HealthReader, read_power_mode
from edge_agent.device.memory import limit_arenas, rss_bytes
from edge_agent.fleet.session import FleetSession
from edge_agent.fleet.steering import Steering
from edge_agent.metrics import EdgeMetrics
from edge_agent.serving.declared import Machine, declared_models
from edge_agent.serving.lineup import Described, Lineup, ServedHere
from edge_agent.serving.local_models import Shelf, local_models, runtime_options
from edge_agent.serving.prompts import PromptCounters
from edge_agent.serving.repository import LocalRepository
from edge_agent.upstream import sources_behind
from hardware_profiles.facts import read_facts
from hardware_profiles.loader import Profile, ProfileMatch, choose_profile
from models.catalogue.places import places_in
from models.store.templates import templates_in
from router.base import systemd
from router.base.build import build_of
from router.base.clock import MonotonicClock
from router.base.config import file_of
from router.base.credentials import resolved
from router.base.garbage import collect_while_few_wait
from router.base.loopback import in_url, is_loopback
from router.base.timers import end, within
from router.cache.metrics import open_cache
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.recording import open_recording
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.deps import GatewayDeps, GatewayLimits
from router.gateway.embedder import embedder
from router.gateway.jobs.calls import Calls
from router.gateway.listener import allow_open_files, bind
from router.gateway.listeners import Listeners, Listening
from router.gateway.tls.ends import CertificateEnds
from router.jobs.opening import open_jobs
from router.tenants.tenancy import open_tenancy
from router.upstream.servers.foreign import Surroundings
from router.upstream.sources import Sources
from router.values.replica import ReplicaInfo

log = structlog.get_logger("edge_agent")

_MALLOC_ARENAS = 2
_CONNECTIONS = ConnectionLimits(max_connections=4096)

Phase = Literal["starting", "serving", "draining"]


class EdgeAgent:
    """One agent; `run` is its whole life.

    Args:
        root: where /proc, /sys and /etc are read.
    """

    def __init__(self, config: EdgeConfig, root: Path = Path("/")) -> None:
        self.config = config
        self.phase: Phase = "starting"
        self.port = config.gateway.port
        self.serving = asyncio.Event()
        self.health: DeviceHealth | None = None
        self.clock = MonotonicClock()
        self._root = root
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._fleet: FleetSession | None = None
        self.match: ProfileMatch = choose_profile(
            config.agent.profile, read_facts(root), file_of(config.agent.profiles_dir)
        )
        self.shelf = Shelf.open(config.models, config.agent.cache_path())
        self._recording = open_recording(config.decisions, config.telemetry, "overspill-edge")
        self.telemetry = self._recording.telemetry
        self.dispatcher = Dispatcher(
            [],
            config.router,
            clock=self.clock,
            telemetry=self.telemetry,
            decisions=self._recording.decisions,
            traces=self._recording.traces,
        )
        database = resolved(config.tenants.database, "tenants.database", os.environ)
        self._tenancy = open_tenancy(key_sources(config.gateway), config.tenants, database, self.clock)
        self._tenancy.watch(self.telemetry.registry)
        self.jobs = open_jobs(config.jobs, self.clock, self.dispatcher, config.gateway.max_body_bytes)
        self.lineup = Lineup(self._describe_models, lambda _: self._publish(), self._condition_changed)
        hooks = self.dispatcher.source_hooks(self._publish)
        places, renderers = places_in(self.shelf.catalogue), templates_in(self.shelf.catalogue, self.shelf.store)
        self._sources = Sources(sources_behind(config, Surroundings(self.clock, hooks, places, renderers)))
        self.repository = LocalRepository(
            self.lineup, self.shelf.catalogue, lambda: self.config.models, self._names_elsewhere
        )
        self._condition_news = asyncio.Event()
        self._was_broken = False
        self._prompts = PromptCounters(self.infos)

    @property
    def profile(self) -> Profile:
        return self.match.profile

    def stop(self) -> None:
        """Drain and end; a second call ends at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> None:
        """Live until `stop`.

        Raises:
            OverspillError: startup failed; says what to do.
        """
        limit_arenas(_MALLOC_ARENAS)
        log.info("profile", name=self.profile.name, why=self.match.reason)
        allow_open_files(_CONNECTIONS)
        bound = bind(self.config.gateway.host, self.config.gateway.port, "gateway")
        self.port = bound.getsockname()[1]
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(bound.close)
            self._take_signals(stack)
            await self._start(stack, bound)
            if not self._stop.is_set():
                self.phase = "serving"
                systemd.notify(systemd.READY)
                self.serving.set()
                log.info(
                    "serving",
                    url=f"http{'s' if self._listeners.tls else ''}://{in_url(self.config.gateway.host)}:{self.port}",
                    models=[replica.info.variant for replica in self.lineup.replicas if not replica.problem],
                    broken=[replica.info.variant for replica in self.lineup.replicas if replica.problem] or None,
                    upstream=self.config.upstream.url or None,
                    backends=[entry.name for entry in self.config.backends] or None,
                    rss_mb=round(rss_bytes() / 1e6),
                    router=build_of().name,
                )
                await self._stop.wait()
            await self._drain()
        log.info("stopped")

    async def _start(self, stack: contextlib.AsyncExitStack, bound: socket.socket) -> None:
        """Bring everything up; what is entered here is left in reverse order."""
        await stack.enter_async_context(self._recording.running())
        await stack.enter_async_context(self._tenancy)
        await stack.enter_async_context(self.dispatcher)
        self.dispatcher.expect(lambda: self._sources.unreached)
        self.dispatcher.tell_of_waiting(self._sources.wanted)
        await stack.enter_async_context(self._sources)
        if self.jobs is not None:
            await stack.enter_async_context(self.jobs)
        deps, config = self._gateway_deps(), self.config
        address = config.gateway.host, config.gateway.port
        app = create_app(deps)
        how = Listening(address, _CONNECTIONS, deps.limits, config.grpc, config.tls)
        self._listeners = Listeners(app, how, self.telemetry.registry)
        listening = await stack.enter_async_context(self._listeners.running(bound))
        listening.add_done_callback(lambda _: self.stop())  # one that dies ends the agent, which is started again
        await stack.enter_async_context(self.lineup)  # after the listener: what it ends can still be told to callers
        garbage = collect_while_few_wait(lambda: self.dispatcher.waiting)
        for name, work in (("health", self._watch_health()), ("watchdog", systemd.watch()), ("garbage", garbage)):
            stack.push_async_callback(end, asyncio.create_task(work, name=name))
        EdgeMetrics(self.telemetry.registry, self.lineup, lambda: self.health, lambda: self._fleet)
        self.telemetry.registry.register(CertificateEnds(config.certificates))
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        stack.push_async_callback(end, stopping)
        try:
            await within(None, self._join_fleet(stack) if self.config.fleet.enabled else self._load(), stopping)
        except asyncio.TimeoutError:
            if not self._stop.is_set():
                raise
        if self.jobs is not None:
            await self.jobs.serve(Calls(app.api.router, self._tenancy.directory))

    async def _join_fleet(self, stack: contextlib.AsyncExitStack) -> None:
        """Put the stored overrides into force, load what is wanted with them, and then listen to the broker."""
        steering = Steering(self)
        session = FleetSession(
            self.config.fleet,
            apply=steering.apply,
            describe=steering.describe,
            telemetry=steering.snapshot,
            ready=self._load,
            clock=self.clock,
        )
        self._fleet = await stack.enter_async_context(session)
        stack.push_async_callback(end, asyncio.create_task(self._tell_fleet(session), name="condition"))

    async def _load(self) -> None:
        await self.lineup.apply(self.repository.effective(self.config.models))
        await self.lineup.load(pipeline.name for pipeline in self.config.pipelines)

    def ready(self) -> tuple[bool, str]:
        """Whether a model here or behind it could take a request, and if not, why."""
        if self.phase != "serving":
            return False, self.phase
        readiness = self.dispatcher.readiness()
        return readiness.ready, readiness.why

    def _condition_changed(self) -> None:
        """A model has failed or recovered: tell the service manager, and the fleet."""
        broken = _problems(self.lineup.replicas)
        if broken or self._was_broken:
            status = f"degraded: {broken}" if broken else "all models can be served"
            systemd.notify(f"STATUS={' '.join(status.split())}")
        self._was_broken = bool(broken)
        self._condition_news.set()

    async def _tell_fleet(self, session: FleetSession) -> None:
        while True:
            await self._condition_news.wait()
            self._condition_news.clear()
            try:
                await session.report()
            except Exception:  # the next change is told again
                log.exception("the fleet was not told of the models' condition")

    # ── what the fleet may ask of it: `edge_agent.fleet.steering.SteeredAgent` ─────────────────────────────────────

    def configuration(self) -> EdgeConfig:
        return self.config

    async def reconfigure(self, wanted: EdgeConfig) -> None:
        """Put a valid configuration into force; requests in flight are not touched.

        Raises:
            ConfigError: nothing could serve its models; everything stays as it was.
        """
        if wanted.models != self.config.models:
            await self.lineup.apply(self.repository.effective(wanted.models))
        if wanted.router != self.config.router:
            self.dispatcher.reconfigure(wanted.router)
        self.config = wanted

    def models(self) -> Sequence[ServedHere]:
        return self.lineup.replicas

    def condition(self) -> tuple[DeviceHealth | None, Telemetry]:
        return self.health, self.telemetry

    async def _drain(self) -> None:
        self.phase = "draining"
        systemd.notify(systemd.STOPPING)
        if self.jobs is not None:
            await self.jobs.stop()
        limit_s = self.config.agent.drain_deadline_s
        log.info("draining", in_flight=self._listeners.busy, deadline_s=limit_s)
        await self._listeners.wait_idle(limit_s, self.clock, self._stop_now)
        if self._listeners.busy:
            log.warning("streams cut off", in_flight=self._listeners.busy)
        self.dispatcher.close()
        self._sources.lose("this tier is shutting down")

    def _take_signals(self, stack: contextlib.AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self._tenancy.directory.ask}
        for number, handler in handlers.items():
            try:
                loop.add_signal_handler(number, handler)
            except (ValueError, RuntimeError, NotImplementedError):
                return  # not in the main thread: the owner calls `stop`
            stack.callback(loop.remove_signal_handler, number)

    def _describe_models(self, settings: LocalModels) -> Sequence[Described]:
        mode = read_power_mode(self._root, self.profile.power_modes)
        speed = next((item.speed for item in self.profile.power_modes if item.name == mode), 1.0)
        machine = Machine(self.shelf.store, runtime_options(settings, self.profile), settings.allow_provider_fallback)
        declared = declared_models(self.config.pipelines, machine)
        return [*local_models(settings, self.profile, self.shelf, speed), *declared]

    def _publish(self) -> None:
        """Tell the router and the gateway which replicas there are now."""
        local = self.lineup.replicas
        self.dispatcher.set_replicas([*local, *self._sources.replicas])
        self._prompts.codecs = {
            name: replica.codec
            for replica in reversed(local)
            if replica.codec is not None
            for name in (replica.info.variant, replica.info.family)
        }

    def infos(self) -> list[ReplicaInfo]:
        """Describe every replica, local ones first."""
        return [replica.info for replica in [*self.lineup.replicas, *self._sources.replicas]]

    def _names_elsewhere(self) -> set[str]:
        """Every name that replicas beyond this device serve."""
        infos = [replica.info for replica in self._sources.replicas]
        return {info.family for info in infos} | {info.variant for info in infos}

    def _gateway_deps(self) -> GatewayDeps:
        settings = self.config.gateway
        return GatewayDeps(
            dispatcher=self.dispatcher,
            prompts=self._prompts,
            tier="edge",
            telemetry=self.telemetry,
            clock=self.clock,
            models=self.infos,
            tenancy=self._tenancy,
            embed=embedder(self.config.cache, self.dispatcher, self.clock),
            cache=open_cache(self.config.cache, self.clock, self.infos, self.telemetry.registry),
            closed=lambda: "" if self.phase == "serving" else self.phase,
            notices=lambda: self._fleet.notices if self._fleet is not None else (),
            limits=GatewayLimits(max_body_bytes=settings.max_body_bytes, max_requests=settings.max_requests),
            kv_usage=self._kv_usage,
            cors=self.config.cors,
            media=self.config.media,
            repository=self.repository,
            local_pages=is_loopback(settings.host),
            jobs=self.jobs,
        )

    def _kv_usage(self) -> float | None:
        """Used share of the KV slots' positions over all local models."""
        snapshots = [replica.snapshot() for replica in self.lineup.replicas]
        snapshots = [item for item in snapshots if item.kv_free_tokens is not None]  # others have no such cache
        total = sum(item.slots * item.info.context_tokens for item in snapshots)
        free = sum(item.kv_free_tokens or 0 for item in snapshots)
        return 1 - free / total if total else None

    async def _watch_health(self) -> None:
        reader: HealthReader | None = None
        while True:
            try:
                if reader is None:
                    reader = await asyncio.to_thread(HealthReader, self.profile, self._root)
                self._heed(await asyncio.to_thread(reader.read))
            except Exception:  # the last reading stays in force; a broken sensor must not end the watch
                log.exception("health unreadable")
            await self.clock.sleep(self.config.agent.health_interval_s)

    def _heed(self, health: DeviceHealth) -> None:
        self.health = health
        for replica in self.lineup.replicas:
            replica.throttle(health.why_not)
        if health.throttle_events:
            log.warning("throttled", events=health.throttle_events, hottest_c=health.hottest_c)


def serve(config: EdgeConfig) -> None:
    """Run an agent on its own event loop until a signal ends it.

    Raises:
        OverspillError: startup failed.
    """
    from router.base import loop  # noqa: PLC0415  (not needed to check a configuration, nor on Windows)

    async def live() -> None:
        await EdgeAgent(config).run()

    loop.run(live())


def _problems(replicas: Sequence[ServedHere]) -> str:
    return "; ".join(f"{item.info.variant}: {item.problem}" for item in replicas if item.problem)
