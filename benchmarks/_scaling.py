"""A model on replicas that come and go: the real dispatcher on a virtual clock, simulated devices, one autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks._autoscalers import REPLICA, RUNG, TTFT_S, Autoscaler, Load
from cloud_tier.scaling.standby import Standby
from router.base.errors import OverspillError
from router.dispatch.dispatcher import Dispatcher
from router.simulation.device import Device
from router.simulation.loop import LoopClock, VirtualLoop
from router.simulation.replica import Host, Reachability, SimReplica, Truth
from router.simulation.run import truths_of
from router.simulation.traces import TraceRow
from router.simulation.values import SimRequest
from router.simulation.world import NoiseSpec, World
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

MODEL = "model"
ROUTER = RouterSettings(max_queue=10_000, max_sheddable_queue=10_000, max_wait_ms=600_000.0, decision_log=40_000)
START_SIGMA = 0.1  # of the log of a cold start


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a request: when its first token came, and when that was predicted to; None: never."""

    arrival_s: float
    ttft_s: float | None
    predicted_s: float | None
    whole: bool

    @property
    def kept(self) -> bool:
        return self.whole and self.ttft_s is not None and self.ttft_s <= TTFT_S


@dataclass(slots=True)
class Seen:
    """What a run left.

    Attributes:
        replica_s: replica-seconds, from being asked for until the last answer had ended.
        path: time and number of replicas, as they changed.
    """

    rows: list[Told] = field(default_factory=list)
    replica_s: float = 0.0
    path: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Pod:
    replica: SimReplica
    asked_s: float
    begins: asyncio.TimerHandle | None = None


class Service:
    """One model: its replicas, the dispatcher before them, and the autoscaler that is asked now and then."""

    def __init__(
        self,
        requests: Sequence[SimRequest],
        autoscaler: Autoscaler,
        loop: VirtualLoop,
        *,
        cold_start_s: float,
        seed: int,
        begin_with: int,
        router: RouterSettings = ROUTER,
    ) -> None:
        self.seen = Seen()
        self._requests, self._autoscaler, self._loop = requests, autoscaler, loop
        self._cold_start_s = cold_start_s
        self._chance = random.Random(seed)  # noqa: S311 - a simulation's chance
        world = World(devices=(REPLICA,), noise=NoiseSpec(sigma=0.3, prior_error_sigma=0.0))
        self._truths: Mapping[str, Truth] = {str(i): t for i, t in enumerate(truths_of(world, requests, seed))}
        self._names = itertools.count(1)
        self._starting: list[_Pod] = []
        self._ready: list[_Pod] = []
        self._draining: list[_Pod] = []
        self._dispatcher = Dispatcher([], router, clock=LoopClock(loop))
        for _ in range(begin_with):
            self._ready.append(self._pod())
        self._publish()

    def _pod(self) -> _Pod:
        name, now_s = f"replica-{next(self._names)}", self._loop.time()
        info = ReplicaInfo(
            replica_id=name,
            endpoint=name,
            tier="cloud",
            remote=False,
            family=MODEL,
            variant=RUNG.variant,
            rung=0,
            quality=1.0,
            context_tokens=RUNG.context_tokens,
            prior=SpeedPrior(RUNG.prefill_tokens_per_s, 1e3 / RUNG.step_ms, RUNG.batch_slope, "simulation"),
            device=name,
        )
        host = Host(Device(REPLICA, self._loop), None, Reachability())
        return _Pod(SimReplica(info, host, 0, self._truths), now_s)

    def _publish(self) -> None:
        replicas: list[SimReplica | Standby] = [pod.replica for pod in self._ready]
        if not replicas:
            like = self._pod().replica.info
            replicas = [Standby(like, REPLICA.slots, lambda: self._autoscaler.ready_in_s(self._loop.time()))]
        self._dispatcher.set_replicas(replicas)
        self.seen.path.append((self._loop.time(), len(self._ready)))

    def _scale_to(self, desired: int) -> None:
        while len(self._ready) + len(self._starting) < desired:
            takes_s = self._cold_start_s * math.exp(START_SIGMA * self._chance.gauss(0.0, 1.0))
            pod = self._pod()
            self._starting.append(pod)
            pod.begins = self._loop.call_later(takes_s, self._serve, pod)  # type: ignore[assignment]
        while len(self._ready) + len(self._starting) > desired:
            if self._starting:
                pod = self._starting.pop()
                assert pod.begins is not None
                pod.begins.cancel()
                self._gone(pod)
                continue
            pod = min(self._ready, key=lambda pod: pod.replica.snapshot().running)
            self._ready.remove(pod)
            self._draining.append(pod)
            self._publish()

    def _serve(self, pod: _Pod) -> None:
        self._starting.remove(pod)
        self._ready.append(pod)
        self._publish()

    def _gone(self, pod: _Pod) -> None:
        self.seen.replica_s += self._loop.time() - pod.asked_s

    async def run(self) -> Seen:
        """Live through all requests."""
        tasks = set()
        async with self._dispatcher:
            scaling = self._loop.create_task(self._scale())
            for index, request in enumerate(self._requests):
                await asyncio.sleep(max(0.0, request.arrival_s - self._loop.time()))
                task = self._loop.create_task(self._one(index, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.gather(*tasks)
            scaling.cancel()
            await asyncio.gather(scaling, return_exceptions=True)
        for pod in (*self._starting, *self._ready, *self._draining):
            self._gone(pod)
        return self.seen

    async def _scale(self) -> None:
        while True:
            for pod in [pod for pod in self._draining if not pod.replica.snapshot().running]:
                self._draining.remove(pod)
                self._gone(pod)
            snapshots = [pod.replica.snapshot() for pod in (*self._ready, *self._draining)]
            load = Load(
                now_s=self._loop.time(),
                waiting=self._dispatcher.waiting,
                running=sum(s.running + s.queued for s in snapshots),
                ready=len(self._ready),
                starting=len(self._starting),
            )
            self._scale_to(self._autoscaler.desired(load))
            await asyncio.sleep(self._autoscaler.period_s)

    async def _one(self, index: int, request: SimRequest) -> None:
        began_s = self._loop.time()
        self._autoscaler.came(began_s, request)
        sent = InferenceRequest(
            request_id=str(index),
            model=MODEL,
            prompt=TextPrompt("simulated"),
            sampling=SamplingParams(max_tokens=None),
            objective=request.objective,
            prompt_tokens=request.prompt_tokens,
            accepted_at_s=began_s,
            prompt_bytes=request.wire_bytes,
        )
        first_s, tokens = None, 0
        with contextlib.suppress(OverspillError):
            answer = await self._dispatcher.start(sent)
            async with contextlib.aclosing(answer.chunks) as chunks:
                async for chunk in chunks:
                    if chunk.tokens and first_s is None:
                        first_s = self._loop.time() - began_s
                    tokens += chunk.tokens
        record = self._dispatcher.decision(sent.request_id)
        predicted_s = record.promised_ttft_s if record is not None else None
        whole = tokens >= request.answer_tokens
        self.seen.rows.append(Told(request.arrival_s, first_s, predicted_s, whole))
        if record is not None and record.sent_ms is not None and first_s is not None:
            bound_s = record.sent_ms / 1e3
            self._autoscaler.ended(self._loop.time() - began_s - bound_s, first_s - bound_s)


Burst = tuple[float, float, float]
"""When it begins, how long it lasts, and how many requests a second it adds."""


def in_bursts(
    rows: Sequence[TraceRow], bursts: Sequence[Burst], base_rps: float, lasts_s: float
) -> tuple[SimRequest, ...]:
    """Return requests of a trace with a rate that changes over time: a time change, which leaves its own unevenness."""
    changes = sorted(
        {0.0, lasts_s, *(edge for start, span, _ in bursts for edge in (start, min(start + span, lasts_s)))}
    )
    pieces = [
        (begin, end, base_rps + sum(rate for start, span, rate in bursts if start <= begin < start + span))
        for begin, end in itertools.pairwise(changes)
    ]
    gap_s = rows[-1].arrival_s / (len(rows) - 1)
    requests: list[SimRequest] = []
    piece, passed = 0, 0.0
    for number in itertools.count():
        lap, index = divmod(number, len(rows))
        row = rows[index]
        offset = (lap * len(rows)) + row.arrival_s / gap_s
        while piece < len(pieces) and offset > passed + (pieces[piece][1] - pieces[piece][0]) * pieces[piece][2]:
            passed += (pieces[piece][1] - pieces[piece][0]) * pieces[piece][2]
            piece += 1
        if piece == len(pieces):
            return tuple(requests)
        begin, _, rate = pieces[piece]
        at_s = begin + (offset - passed) / rate
        requests.append(SimRequest(at_s, row.input_tokens, row.output_tokens, Objective()))
    raise AssertionError


def draw_bursts(seed: int, lasts_s: float, every_s: float, heights_rps: tuple[float, float]) -> list[Burst]:
    """Draw when bursts begin, how long they last (1 to 6 minutes) and how high they are."""
    chance = random.Random(seed)  # noqa: S311 - a simulation's chance
    bursts, at_s = [], chance.expovariate(1 / every_s)
    while at_s < lasts_s:
        span_s = chance.uniform(60, 360)
        bursts.append((at_s, span_s, chance.uniform(*heights_rps)))
        at_s += span_s + chance.expovariate(1 / every_s)
    return bursts
