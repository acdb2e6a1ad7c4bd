"""Replicas that take their time on a virtual clock, fail as they are told, and keep count; a world of four of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from router.base.errors import InvalidRequest, LinkLost, OverspillError, ReplicaBroken, ReplicaUnreachable, Unavailable
from router.dispatch.dispatcher import Dispatcher
from router.signals.link import Link, LinkPrior
from router.values.chunk import FinishReason, Origin, TokenChunk
from router.values.link import LinkSnapshot
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Locality, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings
from tests.support.clocks import VirtualClock

FAMILY = "tiny"
UPSTREAM = "http://cloud:8700"


def info(name: str = "int8", *, remote: bool = False, **changes: Any) -> ReplicaInfo:
    qualities = {"fp32": (0, 1.0), "int8": (1, 0.98), "pruned-fp32": (2, 0.75), "pruned-int8": (3, 0.72)}
    rung, quality = qualities[name]
    fields: dict[str, Any] = {
        "replica_id": f"{UPSTREAM if remote else 'local'}/{FAMILY}-{name}",
        "endpoint": UPSTREAM if remote else "local",
        "tier": "cloud" if remote else "edge",
        "remote": remote,
        "family": FAMILY,
        "variant": f"{FAMILY}-{name}",
        "rung": rung,
        "quality": quality,
        "context_tokens": 8192 if remote else 2048,
        "prior": SpeedPrior(1000.0, 50.0, 0.1, "test"),
        "device": f"{UPSTREAM if remote else 'local'}/{name}",  # its own, unless a test lets rungs share one
    }
    return ReplicaInfo(**{**fields, **changes})


def word(index: int) -> str:
    """The `index`-th token of every answer: a seam that loses or doubles one cannot hide."""
    return f"w{index} "


def answer(tokens: int, start: int = 0) -> str:
    return "".join(word(i) for i in range(start, start + tokens))


@dataclass(eq=False)
class FakeReplica:
    """Serves `slots` at a time at the speed of its prior (times `slower`), the others wait inside.

    Attributes:
        faults: taken from the front, one a call: `unreachable`, `crash`, `invalid`, `hang`, `silent`, `("refuse", s)`,
            `("break", n)`, `("stall", n)`, `("empty", n)`, `("left", n)` after n tokens, `wordless` (tokens that show
            nothing), an error of the tree, or None.
        cuts: its answers end by length, whatever their cap.
        kv_tokens: size of its KV cache, of which the requests inside hold their prompts; None tells nothing of it.
        most_kv_tokens: the most that they ever held.
        held: prompts that it has computed and keeps, as token ids; None keeps nothing, and tells nothing of it.
        host: replicas on the same cores, itself included: those that run divide them.
        sent: the requests it got; open: those running or waiting inside now; most: the most that were ever open.
    """

    info: ReplicaInfo
    clock: VirtualClock
    slots: int = 4
    engines: int = 1
    slower: float = 1.0
    link: LinkSnapshot | None = None
    available: bool = True
    queue_limit: int = 1000
    faults: list[Any] = field(default_factory=list)
    origin: Origin | None = None
    sent: list[InferenceRequest] = field(default_factory=list)
    open: int = 0
    most: int = 0
    answer_tokens: int = 24
    others: int = 0
    age_s: float = 0.0
    counts_prompt: bool = False
    cuts: bool = False
    kv_tokens: int | None = None
    most_kv_tokens: int = 0
    held: list[tuple[int, ...]] | None = None
    host: tuple[FakeReplica, ...] = ()

    def __post_init__(self) -> None:
        self._slot = asyncio.Semaphore(self.slots)
        self._running = 0
        self._left: dict[int, int] = {}
        self._prompts: dict[int, int] = {}
        self._ids = count()

    def _slowed(self, alone_s: float) -> float:
        return self.slower * max(1, sum(replica._running > 0 for replica in self.host)) * alone_s

    def snapshot(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            info=self.info,
            available=self.available,
            slots=self.slots,
            engines=self.engines,
            running=self._running + self.others,
            queued=self.open - self._running,
            pending_decode_tokens=sum(self._left.values()) + self.others * self.answer_tokens,
            age_s=self.age_s,
            kv_free_tokens=None if self.kv_tokens is None else self.kv_tokens - sum(self._prompts.values()),
            why="" if self.available else "switched off",
        )

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        self.sent.append(request)
        fault = self.faults.pop(0) if self.faults else None
        kind, at = fault if isinstance(fault, tuple) else (fault, 0)
        if isinstance(kind, OverspillError):
            raise kind
        if kind == "unreachable":
            raise ReplicaUnreachable("connection refused")
        if kind == "refuse":
            raise Unavailable("no room", retry_after_s=at)
        if kind == "invalid":
            raise InvalidRequest("not for me", param="prompt")
        if kind == "crash":
            raise ZeroDivisionError("a bug")
        key = next(self._ids)
        self.open += 1
        self.most = max(self.most, self.open)
        self._prompts[key] = request.prompt_tokens
        self.most_kv_tokens = max(self.most_kv_tokens, sum(self._prompts.values()))
        try:
            async with self._slot:
                self._running += 1
                try:
                    async for chunk in self._tokens(request, kind, at, key):
                        yield chunk
                finally:
                    self._running -= 1
        finally:
            self._left.pop(key, None)
            self._prompts.pop(key, None)
            self.open -= 1

    async def _tokens(self, request: InferenceRequest, kind: str | None, at: int, key: int):
        prior = self.info.prior
        begun = len(request.continuation.split())
        cap = request.sampling.max_tokens
        total = self.answer_tokens if not request.sampling.ignore_eos else 10**6
        total = min(total, cap if cap is not None else 10**6)
        self._left[key] = max(total - begun, 1)
        if kind == "hang":
            await self.clock.sleep(1e9)
        cached = self._found(request)
        await self.clock.sleep(self._slowed((request.prompt_tokens - (cached or 0)) / prior.prefill_tokens_per_s))
        for index in range(begun, total):
            if kind in {"break", "stall", "silent", "empty", "left"} and index - begun >= at:
                if kind == "stall":
                    await self.clock.sleep(1e9)
                if kind == "silent":
                    return
                if kind == "left":
                    raise LinkLost("this machine left the network")
                if kind == "empty":
                    yield TokenChunk("", 1)
                raise ReplicaBroken("power cut")
            batch = 1 + prior.decode_batch_slope * (self._running - 1)
            await self.clock.sleep(self._slowed(batch / prior.decode_tokens_per_s))
            self._left[key] -= 1
            first = index == begun
            origin = self.origin if first else None
            text = "" if kind == "wordless" else word(index)
            yield TokenChunk(text, 1, origin=origin, cached_tokens=cached if first else None)
        stopped = not self.cuts and (cap is None or total < cap)
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        counted = request.prompt_tokens if self.counts_prompt else None
        yield TokenChunk("", 0, finish_reason=reason, prompt_tokens=counted)

    def _found(self, request: InferenceRequest) -> int | None:
        """Tokens of the prompt that it holds already; the prompt is held from now on."""
        if self.held is None or request.encoded is None:
            return None
        ids = request.encoded.token_ids
        found = [len(held) for held in self.held if held == ids[: len(held)]]
        self.held.append(ids)
        return min(max(found, default=0), len(ids) - 1)


_request_ids = count()


def request(clock: VirtualClock, prompt_tokens: int = 50, **changes: Any) -> InferenceRequest:
    sampling = {k: changes.pop(k) for k in ("max_tokens", "ignore_eos") if k in changes}
    names = ("ttft_s", "tpot_s", "deadline_s", "late_s", "shorten", "priority", "locality", "min_quality", "session")
    objective = {k: changes.pop(k) for k in names if k in changes}
    if isinstance(objective.get("locality"), str):
        objective["locality"] = Locality(objective["locality"])
    fields: dict[str, Any] = {
        "request_id": f"r{next(_request_ids)}",
        "model": FAMILY,
        "prompt": TextPrompt("hello"),
        "sampling": SamplingParams(**sampling),
        "objective": Objective(**objective),
        "prompt_tokens": prompt_tokens,
        "accepted_at_s": clock.now_s(),
        "prompt_bytes": prompt_tokens * 4,
    }
    return InferenceRequest(**{**fields, **changes})


@dataclass
class World:
    """One device with two rungs, a cloud with two, and the dispatcher over them."""

    clock: VirtualClock
    local: FakeReplica
    small: FakeReplica
    cloud: FakeReplica
    cloud_small: FakeReplica
    dispatcher: Dispatcher

    @property
    def all(self) -> list[FakeReplica]:
        return [self.local, self.small, self.cloud, self.cloud_small]

    async def ask(self, **changes: Any) -> tuple[Any, str]:
        """Send a request and read it to its end; returns the route and the text."""
        return await self.read(request(self.clock, **changes))

    async def read(self, what: InferenceRequest) -> tuple[Any, str]:
        running = await self.dispatcher.start(what)
        try:
            text = ""
            async for chunk in running.chunks:
                text += chunk.text
            return running.route, text
        finally:
            await running.chunks.aclose()

    def record(self, request_id: str) -> dict[str, Any]:
        found = self.dispatcher.explain(request_id)
        assert found is not None
        return found.to_json()

    def nothing_is_held(self) -> None:
        """Every credit, place and slot was given back, and no prompt is kept."""
        assert len(self.dispatcher._signals.in_flight) == 0
        assert all(device.clock.prefilling == 0 for device in self.dispatcher._signals.latency._devices.values())
        assert self.dispatcher.waiting == 0
        assert all(record.outcome is not None for record in self.dispatcher._log)
        assert [replica.open for replica in self.all] == [0] * 4
        affinity = self.dispatcher._signals.affinity
        assert (len(affinity._chains), len(affinity._untold)) == (0, 0)


@contextlib.asynccontextmanager
async def world(*, remote: bool = True, **settings: Any):
    clock = VirtualClock()
    link = Link(UPSTREAM, LinkPrior(rtt_s=0.02)).snapshot()
    local = FakeReplica(info("int8"), clock)
    small = FakeReplica(info("pruned-int8", prior=SpeedPrior(2000.0, 100.0, 0.1, "test")), clock)
    cloud = FakeReplica(info("fp32", remote=True, prior=SpeedPrior(4000.0, 80.0, 0.05, "test")), clock, 8, link=link)
    cloud_small = FakeReplica(
        info("pruned-fp32", remote=True, prior=SpeedPrior(8000.0, 160.0, 0.05, "test")), clock, 8, link=link
    )
    replicas = [local, small, cloud, cloud_small] if remote else [local, small]
    async with Dispatcher(replicas, RouterSettings(**settings), clock=clock) as dispatcher:
        yield World(clock, local, small, cloud, cloud_small, dispatcher)
