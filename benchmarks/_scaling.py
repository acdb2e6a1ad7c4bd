"""A model on replicas that come and go: the real dispatcher on a virtual clock, simulated devices, one autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cloud_tier.scaling.scaler import PoolLoad, Scaler
from cloud_tier.scaling.settings import ScalingSettings
from cloud_tier.scaling.standby import Standby
from router.base.errors import OverspillError
from router.dispatch.dispatcher import Dispatcher
from router.simulation.device import Device
from router.simulation.loop import LoopClock, VirtualLoop
from router.simulation.replica import Host, Reachability, SimReplica, Truth
from router.simulation.run import truths_of
from router.simulation.traces import TraceRow
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, NoiseSpec, RungSpec, World
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

MODEL = "model"
RUNG = RungSpec(
    variant="model-bf16",
    quality=1.0,
    prefill_tokens_per_s=8_000,
    step_ms=18,
    batch_slope=0.08,
    context_tokens=16_384,
)
REPLICA = DeviceSpec(name="replica", slots=8, rungs=(RUNG,), prefill_share=0.8, decode_share=0.3)
ROUTER = RouterSettings(max_queue=10_000, max_sheddable_queue=10_000, max_wait_ms=600_000.0, decision_log=40_000)
START_SIGMA = 0.1  # of the log of a cold start
TTFT_S = ROUTER.ttft_slo_ms / 1e3


@dataclass(frozen=True, slots=True)
class Load:
    """What an autoscaler may look at, at one moment."""

    now_s: float
    waiting: int
    running: int
    ready: int
    starting: int


class Autoscaler(Protocol):
    """Says how many replicas there should be; asked every `period_s`."""

    period_s: float

    def came(self, now_s: float, request: SimRequest) -> None:
        """A request came."""

    def ended(self, held_s: float, first_s: float) -> None:
        """An answer ended."""

    def desired(self, load: Load) -> int:
        """Return the number of replicas."""
        ...

    def ready_in_s(self, now_s: float) -> float:
        """Return seconds until the next replica should serve, as far as it knows."""
        ...


class _Deaf:
    def came(self, now_s: float, request: SimRequest) -> None:
        """Nothing is learnt from requests."""

    def ended(self, held_s: float, first_s: float) -> None:
        """Nothing is learnt from answers."""

    def ready_in_s(self, now_s: float) -> float:
        """Nothing is known of it."""
        raise AssertionError(f"at {now_s:g} s there is no replica, which these baselines never let happen")


class Hpa:
    """Kubernetes' horizontal autoscaler: 10 % tolerance, up by the larger of double and four pods a sync, down to the
    most that was recommended within 300 s.
    """

    def __init__(self, least: int, most: int, down_s: float = 300.0) -> None:
        self._least, self._most, self._down_s = least, most, down_s
        self._past: deque[tuple[float, int]] = deque()

    def sync(self, now_s: float, now: int, wanted: float) -> int:
        """Return the number of pods after a sync whose metric asks for `wanted` of them."""
        count = now if now and abs(wanted / now - 1.0) <= 0.1 else math.ceil(wanted - 1e-9)
        count = min(max(count, self._least), self._most)
        self._past.append((now_s, count))
        while self._past[0][0] < now_s - self._down_s:
            self._past.popleft()
        if count >= now:
            return min(count, max(2 * now, now + 4))
        return min(now, max(kept for _, kept in self._past))


class Keda(_Deaf):
    """KEDA's usual scaler for model servers: waiting requests, 5 a replica, through the horizontal autoscaler."""

    period_s = 15.0

    def __init__(self, least: int, most: int) -> None:
        self._hpa = Hpa(least, most)

    def desired(self, load: Load) -> int:
        return self._hpa.sync(load.now_s, load.ready + load.starting, load.waiting / 5.0)


class RayServe(_Deaf):
    """Ray Serve's default: 2 ongoing requests a replica over the last 30 s; up after 30 s, down after 600 s."""

    period_s = 1.0

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._seen: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None
        self._up = False

    def desired(self, load: Load) -> int:
        self._seen.append((load.now_s, load.waiting + load.running))
        while self._seen[0][0] < load.now_s - 30.0:
            self._seen.popleft()
        now = load.ready + load.starting
        mean = sum(count for _, count in self._seen) / len(self._seen)
        wanted = min(max(math.ceil(mean / 2.0), self._least), self._most)
        if wanted == now:
            self._since_s = None
            return now
        if self._since_s is None or self._up is not (wanted > now):
            self._since_s, self._up = load.now_s, wanted > now
        if load.now_s - self._since_s < (30.0 if self._up else 600.0):
            return now
        self._since_s = None
        return wanted


class Law:
    """The law behind `/v1/scale`, looked at each second as a tier does, and read by the horizontal autoscaler."""

    period_s = 1.0

    def __init__(self, settings: ScalingSettings, *, sync_s: float = 15.0) -> None:
        self.scaler = Scaler(settings, 0.0, default_ttft_s=TTFT_S)
        self.asked = settings.min_replicas
        self._sync_s, self._next_s = sync_s, 0.0
        self._hpa = Hpa(settings.min_replicas, settings.max_replicas, down_s=0.0)

    def ready_in_s(self, now_s: float) -> float:
        return self.scaler.ready_in_s(now_s)

    def came(self, now_s: float, request: SimRequest) -> None:
        self.scaler.demand.came(now_s, request.objective.ttft_s, request.objective.deadline_s)

    def ended(self, held_s: float, first_s: float) -> None:
        self.scaler.demand.ended(held_s, first_s)

    def desired(self, load: Load) -> int:
        seen = PoolLoad(
            ready=load.ready,
            starting=load.starting,
            slots=REPLICA.slots,
            running=load.running,
            waiting=load.waiting,
            slope=RUNG.batch_slope,
        )
        advice = self.scaler.advise(load.now_s, seen)
        now = load.ready + load.starting
        if load.now_s >= self._next_s:
            self._next_s = load.now_s + self._sync_s
            self.asked = self._hpa.sync(load.now_s, now, advice.desired) if now else advice.desired
        return self.asked


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
