"""Two tiers in a row, with the real dispatcher and the real gateway in both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn

from router.base.clock import MonotonicClock
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import GatewayDeps, create_app
from router.gateway.connection import ConnectionLimits
from router.gateway.listener import Listener
from router.signals.link import Link
from router.tracing.sink import TraceSink
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import UpstreamTier
from router.upstream.source import SourceHooks
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest
from router.values.settings import RouterSettings
from tests.support.gateway_fakes import WordCounter, gateway_deps, replica_info
from tests.support.patience import unhurried
from tests.support.waiting import until

CLOCK = MonotonicClock()
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def told(request: InferenceRequest, words: list[str]) -> tuple[TokenLogprob, ...]:
    """Return log probabilities where they are asked for: minus the length of each word."""
    if request.sampling.logprobs is None:
        return ()
    return tuple(TokenLogprob(word, -float(len(word)), word.encode()) for word in words)


def scored(request: InferenceRequest, *, first: bool) -> tuple[TokenLogprob, ...]:
    """Return the same of a prompt of text, with the first chunk."""
    if not (first and request.scores_prompt and isinstance(request.prompt, TextPrompt)):
        return ()
    start, *rest = (f" {word}" if at else word for at, word in enumerate(request.prompt.text.split()))
    return (TokenLogprob(start, None, start.encode()), *told(request, rest))


class Reciter:
    """A replica that recites ten words, goes on after a continuation, and pauses after the third word if told to."""

    def __init__(self, info: ReplicaInfo) -> None:
        self.info = info
        self.link = None
        self.available = True
        self.pause: asyncio.Event | None = None
        self.requests: list[InferenceRequest] = []
        self.cached_tokens: int | None = None
        self.cached_told_late: int | None = None

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(self.info, available=self.available, slots=4, why="" if self.available else "off")

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        said = request.continuation.split()
        if self.cached_tokens is not None:  # with a token that makes no text yet
            yield TokenChunk("", cached_tokens=self.cached_tokens)
        for index, word in enumerate(WORDS[len(said) :], len(said)):
            if index == 3 and self.pause is not None:
                await self.pause.wait()
            shown = f"{' ' if index else ''}{word}"
            yield TokenChunk(shown, logprobs=told(request, [shown]), prompt_logprobs=scored(request, first=index == 0))
        yield TokenChunk("", 0, finish_reason=FinishReason.STOP, cached_tokens=self.cached_told_late)


class Quiet(uvicorn.Server):
    """Leaves the signals of the test run alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Tier:
    """A gateway on a free port of this event loop, around a real dispatcher."""

    def __init__(
        self,
        name: str,
        replicas: list,
        settings: RouterSettings | None = None,
        traces: TraceSink | None = None,
        **deps: Any,
    ) -> None:
        self.telemetry = Telemetry()
        self.dispatcher = Dispatcher(
            replicas, unhurried(settings), clock=CLOCK, telemetry=self.telemetry, traces=traces
        )
        self.deps: GatewayDeps = gateway_deps(
            self.dispatcher,
            tier=name,
            telemetry=self.telemetry,
            clock=CLOCK,
            models=lambda: [replica.info for replica in self.dispatcher.replicas],
            **{"prompts": WordCounter(), **deps},
        )
        self.server = Listener(create_app(self.deps), ConnectionLimits())
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def __aenter__(self) -> Tier:
        await self.dispatcher.__aenter__()
        self._task = asyncio.create_task(self.server.serve(sockets=[self._socket]))
        await until(lambda: self.server.started)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.server.should_exit = True
        await self._task
        self._socket.close()
        await self.dispatcher.__aexit__(None, None, None)

    def cut(self) -> None:
        """What the network sees when the tier is killed."""
        for listening in self.server.servers:
            listening.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()


@contextlib.asynccontextmanager
async def linked(edge: Tier, cloud: Tier, local: Sequence[Reciter]) -> AsyncIterator[UpstreamTier]:
    """The cloud's rungs beside the edge's own; both tiers run."""
    upstream = UpstreamTier(
        cloud.url,
        link=Link(cloud.url),
        clock=CLOCK,
        options=ServerOptions(poll_interval_s=0.05, connect_timeout_s=5.0, probe_timeout_s=5.0),
        hooks=SourceHooks(
            on_change=lambda: edge.dispatcher.set_replicas([*local, *upstream.replicas]),
            probe_succeeded=edge.dispatcher.probe_succeeded,
            probe_failed=edge.dispatcher.probe_failed,
        ),
    )
    async with upstream:
        await until(lambda: all(r.snapshot().available for r in edge.dispatcher.replicas) and upstream.replicas)
        yield upstream


@contextlib.asynccontextmanager
async def chain() -> AsyncIterator[tuple[Tier, Tier, Reciter, Reciter]]:
    """An edge with a small rung and a cloud with the best one."""
    best = Reciter(replica_info("tiny-fp32", 0, tier="cloud"))
    small = Reciter(replica_info("tiny-int8", 1, tier="edge", quality=0.5))
    async with Tier("cloud", [best]) as cloud, Tier("edge", [small]) as edge, linked(edge, cloud, [small]):
        yield edge, cloud, small, best
