"""A vLLM server of our own: started, watched, started again when it ends, drained. A `ReplicaSource`."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, final

import httpx
import msgspec
import structlog

from cloud_tier.engines.command import ServerSpec, command_of, environment_of, window_of
from cloud_tier.engines.process import ServerProcess
from router.base.errors import ReplicaUnreachable, in_words
from router.base.timers import end
from router.upstream.servers.foreign import Surroundings
from router.upstream.servers.openai import OpenAIServer
from router.upstream.servers.polled import ServerOptions
from router.values.chunk import TokenChunk
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest
from router.values.status import ReplicaFacts

log = structlog.get_logger("cloud_tier.vllm")

_FIRST_START_S = 120.0  # assumed of a start that nobody has seen yet
_LOOK_S = 0.25
_PROBE_S = 2.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_STABLE_S = 60.0  # a server that was ready for so long has earned a quick restart
_HOPELESS_STARTS = 3  # failed so often in a row, nobody knows when it will be back
_UNKNOWN_WINDOW_TOKENS = 1 << 20  # while it starts: refusing nobody for a window that is not known
_MAX_REASON_CHARS = 200
# `(APIServer pid=17) INFO 11-22 04:53:40 [model.py:733] Resolved architecture`
_LINE = re.compile(r"(?:\((?P<who>\S+)[^)]*\) )?(?P<level>[A-Z]+) \d\d-\d\d \S+ \[(?P<where>[^\]]*)\] ?(?P<text>.*)")

MakeServer = Callable[[str, str], OpenAIServer]
"""From a base URL and an API key to the client of the server there."""


@final
class AwaitedReplica:
    """A model of a server that is not ready: known, and unavailable until a time."""

    link = None

    def __init__(self, info: ReplicaInfo, outlook: Callable[[], tuple[str, float]]) -> None:
        self.info = info
        self._outlook = outlook

    def snapshot(self) -> ReplicaSnapshot:
        why, back_in_s = self._outlook()
        return ReplicaSnapshot(self.info, available=False, slots=0, why=why, back_in_s=back_in_s)

    def facts(self) -> ReplicaFacts:
        """See `router.values.status.TellsFacts`."""
        return ReplicaFacts(kind="vllm")

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        """Raise, always: see `router.values.replica.Replica.generate`."""
        raise ReplicaUnreachable(f"{self._outlook()[0]}; request {request.request_id!r} was not sent")
        yield  # what makes it a generator


@final
class VllmServer:
    """Use as `async with`: the server runs, or is about to, until it is left.

    Its replicas are known from the first moment on. Until it is ready they are unavailable, for as long as its last
    start took. A server that ends, or answers neither probes nor requests, is started again with growing pauses; what
    it was answering fails over as from any broken stream.

    Attributes:
        restarts: how often it was started again.
        pid: of the server, and of its process group; None while none runs.
    """

    def __init__(self, spec: ServerSpec, surroundings: Surroundings) -> None:
        self.restarts = 0
        self._spec = spec
        self._name = spec.backend.name + ("-prefill" if spec.backend.role == "prefill" else "")
        self._clock = clock = surroundings.clock
        self._hooks = hooks = surroundings.hooks
        heard = dataclasses.replace(hooks, on_change=self._changed)
        self._make = _maker(spec, self._name, dataclasses.replace(surroundings, hooks=heard))
        self._server: OpenAIServer | None = None
        self._known: Sequence[ReplicaInfo] = [self._expected("http://127.0.0.1:9", {})]
        self._awaited: list[AwaitedReplica] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._ended_because = ""
        self._start_at_s = clock.now_s()
        self._start_took_s = _FIRST_START_S
        self._failed_starts = 0
        self._ready = False
        self._leaving = False
        self._pause_s = _FIRST_PAUSE_S
        self.pid: int | None = None
        self._await()

    @property
    def who(self) -> str:
        return f"vllm {self._name}"

    @property
    def where(self) -> str:
        return "" if self._server is None else self._server.where

    @property
    def local(self) -> bool:
        return True

    @property
    def replicas(self) -> Sequence[Replica]:
        """What it serves, or will."""
        found = self._server.replicas if self._server is not None else []
        return found or list(self._awaited)

    @property
    def unreached(self) -> str:
        """Always empty: what it serves is configured."""
        return ""

    def wanted(self) -> None:
        if self._server is not None:
            self._server.wanted()

    def lose(self, why: str) -> None:
        if self._server is not None:
            self._server.lose(why)

    async def __aenter__(self) -> VllmServer:
        self._start_at_s = self._clock.now_s()
        self._supervisor = asyncio.create_task(self._supervise(), name=self.who)
        self._hooks.on_change()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        if self._supervisor is not None:
            await end(self._supervisor)

    async def _supervise(self) -> None:
        """Keep a server alive until cancelled."""
        while True:
            began_s, self._start_at_s = self._clock.now_s(), self._clock.now_s()
            self._ready = False
            try:
                why = await self._live()
            except Exception as error:  # what this host lacks now (processes, disk) it may have again
                log.exception("vllm met an error", backend=self._name)
                why = in_words(error)
            if self._clock.now_s() - began_s > _STABLE_S and self._ready:
                self._pause_s = _FIRST_PAUSE_S
            self._failed_starts = 0 if self._ready else self._failed_starts + 1
            self._ended_because = " ".join(why.split())[:_MAX_REASON_CHARS]
            pause_s = self._pause_s
            self._start_at_s = self._clock.now_s() + pause_s
            log.error("vllm ended; it will be started again", backend=self._name, why=why, pause_s=pause_s)
            self._hooks.on_change()
            await self._clock.sleep(pause_s)
            self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.restarts += 1

    async def _live(self) -> str:
        """Run it once, and say why it ended."""
        settings = self._spec.settings
        port, key = settings.port or _free_port(), secrets.token_hex(24)
        environment = environment_of(self._spec, key, _free_port())
        command = command_of(self._spec, port)
        process = ServerProcess(command, environment, self._log_line)
        log.info("starting vllm", backend=self._name, command=" ".join(command), gpus=self._spec.gpus)
        grace_s = settings.stop_s  # for a server that we end ourselves; one that ended needs none
        try:
            await process.start()
            self.pid = process.pid
            ended = asyncio.create_task(process.ended(), name=f"{self.who} ends")
            watching = asyncio.create_task(self._serve(f"http://127.0.0.1:{port}", key), name=f"{self.who} serves")
            try:
                await asyncio.wait({ended, watching}, return_when=asyncio.FIRST_COMPLETED)
                why = ended.result() if ended.done() else watching.result()
            finally:
                self.lose("vLLM has ended" if ended.done() else "vLLM is being ended")
                await end(ended, watching)
            grace_s = 0.0
            return why
        finally:
            self.pid = None
            await _to_the_end(process.end(grace_s))

    async def _serve(self, url: str, key: str) -> str:
        """Wait until it is ready, publish what it serves, and return when it is silent for too long."""
        limit_s = self._spec.settings.start_timeout_s
        began_s = self._clock.now_s()
        async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_S) as client:
            while not await _healthy(client, url):
                if self._clock.now_s() - began_s > limit_s:
                    return f"not ready within start_timeout_s = {limit_s:g}"
                await self._clock.sleep(_LOOK_S)
        server = self._make(url, key)
        self._known = [self._expected(url, _measured(self._known), server)]
        async with server:
            self._server = server
            try:
                return await self._silence(server)
            finally:  # nobody is sent there any more before its connections are closed
                self._known = [replica.info for replica in server.replicas] or self._known
                self._server = None
                self._await()
                self._hooks.on_change()

    async def _silence(self, server: OpenAIServer) -> str:
        """Return when the server has answered neither probe nor request for too long."""
        limit_s, silent_since_s = self._spec.settings.silent_s, None
        while True:
            await self._clock.sleep(min(1.0, limit_s / 4))
            now_s = self._clock.now_s()
            if server.condition.reachable:
                silent_since_s = None
            elif silent_since_s is None:
                silent_since_s = now_s
            elif now_s - silent_since_s >= limit_s:
                return f"no answer for silent_s = {limit_s:g}"

    def _changed(self) -> None:
        """What the server publishes has changed: the first time in its life, it is ready."""
        if self._server is not None and self._server.replicas and not self._ready:
            self._ready, self._failed_starts, self._ended_because = True, 0, ""
            self._start_took_s = max(self._clock.now_s() - self._start_at_s, _LOOK_S)
            infos = [replica.info for replica in self._server.replicas]
            log.info(
                "vllm ready",
                backend=self._name,
                models=[info.variant for info in infos],
                start_s=round(self._start_took_s, 1),
                decode_tokens_per_s=[round(info.prior.decode_tokens_per_s, 1) for info in infos],
            )
        self._hooks.on_change()

    def _expected(self, url: str, speeds: Mapping[str, SpeedPrior], server: OpenAIServer | None = None) -> ReplicaInfo:
        settings = self._spec.settings
        window = window_of(settings) or _UNKNOWN_WINDOW_TOKENS
        return (server or self._make(url, "")).expect(settings.served_name, window, speeds)

    def _await(self) -> None:
        self._awaited = [AwaitedReplica(info, self._outlook) for info in self._known]

    def _outlook(self) -> tuple[str, float]:
        """Say why it does not serve, and in how many seconds it should; 0 where too many starts have failed."""
        ended = f" again, it ended: {self._ended_because}" if self._ended_because else ""
        why = f"vLLM is starting{ended}"
        if self._failed_starts >= _HOPELESS_STARTS:
            return why, 0.0
        now_s = self._clock.now_s()
        left_s = self._start_at_s + self._start_took_s - now_s
        return why, max(left_s, 0.1 * (now_s - self._start_at_s), 1.0)  # a start that takes longer, takes longer yet

    def _log_line(self, line: str) -> None:
        found = _LINE.fullmatch(line)
        if found is None or self._leaving:  # told to end, it calls its own processes' ends errors
            log.debug("vllm", backend=self._name, line=line)
            return
        tell = {"WARNING": log.warning, "ERROR": log.error, "CRITICAL": log.error}.get(found["level"], log.debug)
        tell("vllm", backend=self._name, line=found["text"], where=found["where"], process=found["who"])


def _maker(spec: ServerSpec, name: str, surroundings: Surroundings) -> MakeServer:
    """Return what makes the client of the server at an address: on this machine, and known to be vLLM."""
    backend = spec.backend
    served = msgspec.structs.replace(
        backend,
        server="vllm",
        local=True,
        device=backend.device or f"vllm/{name}",  # the same one after a restart, at whatever port
    )

    def make(url: str, key: str) -> OpenAIServer:
        options = ServerOptions(
            api_key=key or None,
            poll_interval_s=backend.poll_interval_s,
            connect_timeout_s=backend.connect_timeout_s,
        )
        return OpenAIServer(url, name, served, surroundings, options)

    return make


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


def _measured(infos: Sequence[ReplicaInfo]) -> dict[str, SpeedPrior]:
    """Return the speeds that were measured before: a server that starts again need not be measured again."""
    return {info.variant: info.prior for info in infos if info.prior.source.startswith("measured")}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the waiting task is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
