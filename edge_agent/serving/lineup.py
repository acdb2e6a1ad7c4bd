"""Which replicas answer on this device: local models as configured, and the rungs of the upstream.

A change of configuration never drops a request: new models are ready before the router sees them, and a model that
goes away leaves the router first and is closed when its last answer is complete.

One broken model is one broken model. What cannot be loaded stays in the lineup, unavailable and with its reason, and
is tried again: its artifact may be repaired, memory may come back. What changes on disk beneath a model is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import structlog

from edge_agent.config import LocalModels
from edge_agent.generate.turn import Turn
from edge_agent.serving.artifact_watch import ArtifactWatch
from edge_agent.serving.prompts import PromptCodec
from router.base.errors import ConfigError, OverspillError
from router.base.timers import end
from router.values.replica import Replica, ReplicaInfo

log = structlog.get_logger("edge_agent")

_RETIRE_AFTER_S = 600.0
_RETIRE_LOOK_S = 0.2
_TEND_S = 2.0
_DESCRIBE_PAUSE_S = (5.0, 60.0)  # between two attempts to read a broken artifact: at first, and at most


class ServedHere(Replica, Protocol):
    """A model of this device as a replica, whatever it does.

    Attributes:
        fault: why its artifact must not be loaded; empty when nothing is known against it.
        notice: what an operator should know of a model that serves all the same.
    """

    fault: str
    notice: str

    @property
    def codec(self) -> PromptCodec | None:
        """Tokenizer and chat template; None where it has none, or they cannot be read."""
        ...

    @property
    def watch(self) -> ArtifactWatch | None:
        """Tells whether the artifact has changed; None for one that was broken from the start."""
        ...

    @property
    def digest(self) -> str:
        """`sha256:…` of the artifact's manifest; empty where it cannot be read."""
        ...

    @property
    def loaded(self) -> bool: ...

    @property
    def problem(self) -> str:
        """Why it cannot answer; empty for one that can, or that loads with its first request."""
        ...

    @property
    def remarks(self) -> str:
        """All that an operator should know of it, empty when it is as configured."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it should be loaded and is not; `load` tries again."""
        ...

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago."""
        ...

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer of it."""
        ...

    @property
    def slots(self) -> int:
        """Requests that it computes, or gathers, together at most."""
        ...

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Accelerators asked for and not had, a line each."""
        ...

    @property
    def can_do_without_store(self) -> bool:
        """Whether it is loaded, or can be loaded from its own copy, whatever has become of the store's files."""
        ...

    def prepare(self) -> None:
        """Do ahead what the first load would otherwise wait for. Blocks; raises ArtifactError."""
        ...

    async def load(self) -> None:
        """Load it before its first request; raises ReplicaUnreachable, which says why."""
        ...

    async def tend(self) -> None:
        """Do what is to be done now and then."""
        ...

    def throttle(self, why: str) -> None:
        """Offer less while the device is in trouble (`why`); an empty text ends that."""
        ...

    async def close(self) -> None:
        """Free it; requests still inside end as `ReplicaBroken`."""
        ...


class Described(Protocol):
    """A model before it is served."""

    @property
    def info(self) -> ReplicaInfo: ...

    @property
    def fault(self) -> str:
        """Why it cannot be served, known before loading; empty for a whole artifact."""
        ...

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that its replica is made from: equal models need only one."""
        ...

    def replica(self, turn: Turn) -> ServedHere:
        """Make its replica; `turn` is what the models of a device compute by."""
        ...


Describe = Callable[[LocalModels], Sequence[Described]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A replica and everything it was made from: equal entries are one replica."""

    key: tuple[object, ...]
    replica: ServedHere


class Lineup:
    """Owns the local replicas. Use as `async with`.

    Args:
        describe: from settings to models; raises for settings that nothing could serve.
        publish: called with the local replicas, best first, after each change.
        on_condition: called when a model has failed or recovered, or its artifact has changed.
    """

    def __init__(
        self,
        describe: Describe,
        publish: Callable[[Sequence[Replica]], None],
        on_condition: Callable[[], None] = lambda: None,
    ) -> None:
        self._describe = describe
        self._publish = publish
        self._on_condition = on_condition
        self._condition: list[tuple[str, str, str]] = []
        self._settings: LocalModels | None = None
        self._applying = asyncio.Lock()
        self._describe_again_at_s = 0.0
        self._describe_pause_s = _DESCRIBE_PAUSE_S[0]
        self._tending: asyncio.Task[None] | None = None
        self._turn = Turn()
        self._entries: list[_Entry] = []
        self._retiring: dict[asyncio.Task[None], ServedHere] = {}

    async def __aenter__(self) -> Lineup:
        self._tending = asyncio.create_task(self._tend(), name="tend models")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        retiring = dict(self._retiring)
        await end(*filter(None, [self._tending]), *retiring)
        await asyncio.gather(*(replica.close() for replica in (*self.replicas, *retiring.values())))

    @property
    def replicas(self) -> list[ServedHere]:
        return [entry.replica for entry in self._entries]

    async def apply(self, settings: LocalModels) -> None:
        """Serve what `settings` says from now on, as far as it can be served.

        Raises:
            ConfigError: nothing could serve it, whatever the device's state; everything stays as it was.
        """
        async with self._applying:
            await self._apply(settings)

    async def load(self, variants: Iterable[str]) -> None:
        """Load what is served, before its first request; what cannot be loaded says so itself."""
        wanted = set(variants)
        for replica in self.replicas:
            if replica.info.variant in wanted and not replica.fault:
                await _loaded(replica)
        self._tell_condition()

    def _described(self, settings: LocalModels) -> Sequence[Described]:
        try:
            return self._describe(settings)
        except OverspillError as error:
            raise ConfigError(f"models: {error.message}", param=error.param or "models") from error

    async def _apply(self, settings: LocalModels) -> None:
        known = {entry.key: entry for entry in self._entries}
        wanted: list[_Entry] = []
        fresh: list[_Entry] = []
        try:
            for model in await asyncio.to_thread(self._described, settings):
                key = (*model.key, _how_loaded(settings))
                entry = known.get(key)
                if entry is None:
                    entry = _Entry(key, model.replica(self._turn))
                    fresh.append(entry)
                    if model.fault:
                        log.error("model broken", variant=model.info.variant, why=model.fault)
                wanted.append(entry)
            for entry in wanted:
                if entry.replica.info.variant in settings.at_start and not entry.replica.fault:
                    await _loaded(entry.replica)
        except BaseException:
            for entry in fresh:  # whoever broke it off need not wait for a load to end
                self._retire(entry.replica)
            raise
        leaving = [entry for entry in self._entries if entry not in wanted]
        self._entries = wanted
        self._settings = settings
        self._publish(self.replicas)
        for entry in leaving:
            self._retire(entry.replica)
        self._tell_condition()

    async def _tend(self) -> None:
        """Watch over the models for as long as the agent lives."""
        while True:
            await asyncio.sleep(_TEND_S)
            for replica in self.replicas:
                await _guarded(self._look_after(replica))
            await _guarded(self._describe_broken())
            self._tell_condition()

    async def _look_after(self, replica: ServedHere) -> None:
        """Notice what changed beneath a model, and load one again that could not be loaded."""
        await replica.tend()
        watch = replica.watch
        if watch is not None and replica.loaded:
            watch.vouch()
        touched = watch is not None and await asyncio.to_thread(watch.touched)
        if watch is not None and touched:
            self._describe_again_at_s = 0.0
            fault = await asyncio.to_thread(watch.fault)
            if fault and replica.can_do_without_store:
                notice = f"its files have changed; what was loaded before is served on: {fault}"
                if replica.notice != notice:
                    log.error("artifact changed", variant=replica.info.variant, why=notice)
                replica.notice, replica.fault = notice, ""
            else:
                if fault and replica.fault != fault:
                    log.error("model broken", variant=replica.info.variant, why=fault)
                replica.notice, replica.fault = "", fault
                if not fault:
                    await asyncio.to_thread(replica.prepare)
        if replica.failed and not replica.fault and (touched or not replica.resting):
            await _loaded(replica)

    async def _describe_broken(self) -> None:
        """Read the artifacts anew while one of them is broken: it may have been repaired, or be another build."""
        if self._settings is None or not any(replica.fault for replica in self.replicas):
            self._describe_pause_s = _DESCRIBE_PAUSE_S[0]
            return
        now_s = asyncio.get_running_loop().time()
        if now_s < self._describe_again_at_s:
            return
        self._describe_again_at_s = now_s + self._describe_pause_s
        self._describe_pause_s = min(2 * self._describe_pause_s, _DESCRIBE_PAUSE_S[1])
        async with self._applying:
            await self._apply(self._settings)

    def _tell_condition(self) -> None:
        condition = [(item.info.variant, item.problem, item.notice) for item in self.replicas]
        if condition != self._condition:
            self._condition = condition
            self._on_condition()

    def _retire(self, replica: ServedHere) -> asyncio.Task[None]:
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
        settings.keep_kv,
    )


async def _retire(replica: ServedHere) -> None:
    """Close a replica that the router no longer knows, when its answers are complete."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _RETIRE_AFTER_S
    try:
        while not replica.idle and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_RETIRE_LOOK_S)
    finally:
        await replica.close()
        log.info("model retired", variant=replica.info.variant)


async def _loaded(replica: ServedHere) -> None:
    """Load a model; one that cannot be loaded says so itself, and is tried again later."""
    try:
        await replica.load()
    except OverspillError as error:
        log.warning("model unavailable", variant=replica.info.variant, why=error.message)


async def _guarded(work: Awaitable[None]) -> None:
    """Await `work` and log its failure: the watch over the other models goes on, and the next check may succeed."""
    try:
        await work
    except Exception:
        log.exception("models not looked after")
