"""`TorchEngine`: the engine of `protocol.Engine` on torch, in supervised processes of its own.

The parent never computes: it writes requests to rank 0's socket and is woken when a step's tokens arrive. When any rank
dies or a step hangs, every stream ends at once with a clean error, the whole group is torn down, and a new one is
started, with growing pauses if that keeps failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine

import msgspec
import structlog

from cloud_tier.engine.checks import check_model, checked_request
from cloud_tier.engine.messages import Abort, Add, LimitLines, Loaded, Quit, Ready, Step, ToParent
from cloud_tier.engine.processes import RankProcess, RankProcesses
from cloud_tier.engine.protocol import (
    EngineChunk,
    EngineConfig,
    EngineInfo,
    EngineLoad,
    EngineOutage,
    EngineRequest,
    EngineState,
)
from cloud_tier.engine.streams import Stream, Streams
from router.base.clock import Clock, MonotonicClock
from router.base.errors import (
    ArtifactError,
    ConfigError,
    OverspillError,
    ReplicaUnreachable,
    in_words,
)

log = structlog.get_logger("cloud_tier.engine")

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STABLE_S = 60.0  # a group that was ready for so long has earned a quick restart
_EXIT_S = 5.0
_REASON_CHARS = 200
_PERMANENT: dict[str, type[OverspillError]] = {error.__name__: error for error in (ArtifactError, ConfigError)}


class _Life:
    """One group of processes, from start to end."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._processes = RankProcesses(config)
        self._began_s = self._heard_s = clock.now_s()
        self.streams = Streams()
        self.info: EngineInfo | None = None
        self._described: EngineInfo | None = None
        self._devices: dict[int, str] = {}
        self.refusal: OverspillError | None = None

    async def serve(self, on_ready: Callable[[EngineInfo], None]) -> str:
        """Start the group, serve, and return why it ended: a rank is gone, or nothing was heard for too long."""
        await self._processes.start()
        watchers = [
            asyncio.create_task(self._watch(number, rank, on_ready), name=f"engine-rank-{number}")
            for number, rank in enumerate(self._processes.ranks)
        ]
        watchers.append(asyncio.create_task(self._watch_time(), name="engine-watchdog"))
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(sorted(watcher.result() for watcher in done))
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def end(self) -> None:
        """Leave no process behind."""
        await self._processes.end()

    def add(self, request: EngineRequest) -> tuple[int, Stream]:
        """Send a request; return its number and its stream."""
        if not self.streams.owes_soon:
            self._heard_s = self._clock.now_s()
        handle, stream = self.streams.open(request)
        try:
            self._processes.ranks[0].send(Add(handle, request))
        except BaseException:  # it cannot be put into a message: the engine owes nothing
            self.streams.close(handle)
            raise
        return handle, stream

    def forget(self, handle: int, stream: Stream) -> None:
        """Close a stream; if it has not ended, tell the engine that nobody waits for it."""
        self.streams.close(handle)
        if not stream.finished:
            self._processes.ranks[0].send(Abort(handle))

    def limit_lines(self, lines: int | None) -> None:
        """Tell the engine how many lines it may compute; once it is ready, if it is not yet."""
        if not self.streams.owes_soon:
            self._heard_s = self._clock.now_s()
        self.streams.lines_limit = lines
        if self.info is not None:
            self._processes.ranks[0].send(LimitLines(lines))

    def quit(self) -> None:
        """Ask the group to end; `serve` returns when it has."""
        self._processes.ranks[0].send(Quit())

    async def _watch(self, number: int, rank: RankProcess, on_ready: Callable[[EngineInfo], None]) -> str:
        """Take what a rank sends; return when it is gone."""
        decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
        async for message in rank.messages(decoder):
            self._heard_s = self._clock.now_s()
            if isinstance(message, Step):
                self.streams.take(message)
            elif isinstance(message, Loaded):
                self._devices[number] = message.device
                self._note_ready(on_ready)
            elif isinstance(message, Ready):
                self._described = message.info
                self._note_ready(on_ready)
            else:
                self.refusal = _PERMANENT.get(message.kind, ReplicaUnreachable)(message.message)
                return f"rank {number} cannot run: {message.message}"
        return f"rank {number} (process {rank.process.pid}) is gone"

    def _note_ready(self, on_ready: Callable[[EngineInfo], None]) -> None:
        """The group is ready once rank 0 says so and every rank has said where it computes, in whatever order."""
        if self._described is None or len(self._devices) < self._config.tensor_parallel:
            return
        self.info = dataclasses.replace(
            self._described,
            pids=self._processes.pids,
            load_s=self._clock.now_s() - self._began_s,
            devices=tuple(self._devices[number] for number in sorted(self._devices)),
        )
        if self.streams.lines_limit is not None:
            self._processes.ranks[0].send(LimitLines(self.streams.lines_limit))
        on_ready(self.info)

    async def _watch_time(self) -> str:
        """Return when the start, or a step, takes too long.

        Two looks must agree on that: if this process or the whole host stood still, what the engine has sent meanwhile
        is read between them.
        """
        suspected = False
        while True:
            limit_s = self._config.start_timeout_s if self.info is None else self._config.step_timeout_s
            silent_s = self._clock.now_s() - self._heard_s
            silent = silent_s >= limit_s and (self.streams.owes_soon or self.info is None)
            if silent and suspected:
                return f"nothing was heard of the engine for {silent_s:.1f} s (limit {limit_s:g} s)"
            suspected = silent
            await self._clock.sleep(min(max(limit_s - silent_s, limit_s / 10), self._config.step_timeout_s))


class TorchEngine:
    """See `protocol.Engine`. Lives in one event loop.

    Args:
        clock: for time limits and pauses.

    Attributes:
        restarts: how often the group was started again.
    """

    def __init__(self, config: EngineConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.restarts = 0
        self._clock = clock or MonotonicClock()
        self._state = EngineState.STOPPED
        self._life: _Life | None = None
        self._info: EngineInfo | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._ended_because = ""
        self._lines_limit: int | None = None
        self._start_at_s: float | None = None  # when the next group of processes is, or was, to be started

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return self._state

    @property
    def ready(self) -> bool:
        """True while `generate` is served."""
        return self._state is EngineState.READY

    @property
    def outage(self) -> EngineOutage | None:
        """See `protocol.Engine.outage`."""
        if self._state is EngineState.READY:
            return None
        if self._state is not EngineState.RESTARTING or self._info is None or self._start_at_s is None:
            return EngineOutage(f"the engine is {self._state.value}", None)
        ready_at_s = self._start_at_s + self._info.load_s
        reason = f"the engine is restarting: {self._ended_because}"
        return EngineOutage(_shortened(reason), max(0.0, ready_at_s - self._clock.now_s()))

    @property
    def info(self) -> EngineInfo | None:
        """The static description of the last group that was ready."""
        return self._info

    async def start(self) -> None:
        """See `protocol.Engine.start`."""
        if self._supervisor is not None:
            raise RuntimeError("the engine is started already")
        await asyncio.to_thread(check_model, self.config)
        self._state = EngineState.STARTING
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = supervisor = asyncio.create_task(self._supervise(started), name="engine-supervisor")
        try:
            await asyncio.wait([started, supervisor], return_when=asyncio.FIRST_COMPLETED)
            if supervisor.cancelled():
                raise ReplicaUnreachable("the engine was stopped before it was ready")
            if not started.done():
                await supervisor
        finally:
            if not started.done():
                await self.stop()

    async def stop(self, drain_s: float = 0.0) -> None:
        """See `protocol.Engine.stop`."""
        if self._supervisor is None:
            return
        life = self._life
        if self._state is EngineState.READY and life is not None:
            self._state = EngineState.DRAINING
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(life.streams.idle.wait(), max(drain_s, 0.001))
            life.streams.fail("the engine was stopped")
            life.quit()
            await asyncio.wait([self._supervisor], timeout=_EXIT_S)
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self._supervisor = None
        self._state = EngineState.STOPPED

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See `protocol.Engine.generate`."""
        life = self._life
        if life is None or life.info is None or not self.ready:
            raise ReplicaUnreachable(f"the engine is {self._state.value}; send the request elsewhere, or later")
        handle, stream = life.add(checked_request(request, life.info))
        try:
            finish_reason = None
            while finish_reason is None:
                chunk = await stream.next()
                finish_reason = chunk.finish_reason
                yield chunk
        finally:
            life.forget(handle, stream)

    def limit_lines(self, lines: int | None) -> None:
        """See `protocol.Engine.limit_lines`. Holds through restarts."""
        if lines != self._lines_limit:
            self._lines_limit = lines
            if self._life is not None:
                self._life.limit_lines(lines)

    def load(self) -> EngineLoad:
        """See `protocol.Engine.load`."""
        return EngineLoad() if self._life is None else self._life.streams.load()

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        """Keep a group alive until stopped.

        Raises:
            OverspillError: the first start failed.
        """

        def on_ready(info: EngineInfo) -> None:
            self._info = info
            self._state = EngineState.READY
            log.info(
                "engine ready",
                weights=self.config.weights,
                load_s=round(info.load_s, 2),
                devices=info.devices,
                dtype=self.config.dtype,
                max_running=self.config.max_running,
                kv_cache_tokens=self.config.kv_cache_tokens,
            )
            if not started.done():
                started.set_result(None)

        while True:
            refusal: OverspillError | None = None
            try:
                refusal, why = await self._live(on_ready)
            except Exception as error:  # what this host lacks now (processes, disk) it may have again
                log.exception("engine met an error", weights=self.config.weights)
                why = in_words(error)
            if self._state is EngineState.DRAINING:
                return
            if not started.done():
                raise refusal or ReplicaUnreachable(f"the engine did not start: {why}")
            self._expect_start(why)
            pause_s = self._pause_s
            log.error("engine ended; it will be restarted", weights=self.config.weights, why=why, pause_s=pause_s)
            await self._clock.sleep(pause_s)
            self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.restarts += 1

    def _expect_start(self, why: str) -> None:
        """Note why the last group ended, and when the next is to be started."""
        self._ended_because, self._start_at_s = why, self._clock.now_s() + self._pause_s

    async def _live(self, on_ready: Callable[[EngineInfo], None]) -> tuple[OverspillError | None, str]:
        """Run one group; return what it refused to run for, if it did, and why it ended.

        Its callers have their errors before its processes are reaped.
        """
        began_s = self._clock.now_s()
        self._life = life = _Life(self.config, self._clock)
        life.limit_lines(self._lines_limit)
        why = "the engine was stopped"
        try:
            why = await life.serve(on_ready)
        except Exception as error:
            why = in_words(error)
            raise
        finally:
            self._life = None
            if self._clock.now_s() - began_s > _STABLE_S:
                self._pause_s = _FIRST_PAUSE_S
            self._expect_start(why)
            if self._state is EngineState.READY:
                self._state = EngineState.RESTARTING
            life.streams.fail(why)
            await _to_the_end(life.end())
        return life.refusal, why


def _shortened(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _REASON_CHARS else f"{line[: _REASON_CHARS - 1]}…"


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Finish `work` even if the waiting task is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
