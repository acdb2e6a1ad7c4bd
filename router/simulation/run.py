"""The real dispatcher over a simulated world: requests in, one row for each out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from router.base import logs
from router.base.errors import OverspillError
from router.base.timers import end
from router.decisions.settings import DecisionFileSettings
from router.decisions.writer import DecisionSink, SimulatedDecisions
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.record import DecisionRecord
from router.simulation.device import Device
from router.simulation.faults import ProbeHooks, Prober, SimDevice, schedule_faults
from router.simulation.loop import LoopClock, VirtualLoop, run_virtually
from router.simulation.network import NetworkPath
from router.simulation.replica import Host, Reachability, SimReplica, Truth
from router.simulation.values import SimRequest, SimRow
from router.simulation.world import DeviceSpec, RungSpec, World
from router.values.answer import Answer, tapped
from router.values.chunk import TokenChunk
from router.values.prompt import EncodedPrompt, TextPrompt
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective, Outcome
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings

_PROMPT = TextPrompt("simulated")
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device did in a simulation.

    Attributes:
        busy_s: seconds in which it computed.
        most_running: the most slots that were ever held.
    """

    name: str
    slots: int
    busy_s: float
    most_running: int


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation.

    Attributes:
        rows: in the order of the requests.
        lasted_s: virtual seconds until the last request ended.
    """

    policy: str
    seed: int
    rows: tuple[SimRow, ...]
    devices: tuple[DeviceUse, ...]
    lasted_s: float

    @property
    def value(self) -> float:
        return sum(row.value for row in self.rows)

    @property
    def kept_share(self) -> float:
        return sum(row.kept for row in self.rows) / len(self.rows)

    @property
    def decisions_a_request(self) -> float:
        return sum(row.decisions for row in self.rows) / len(self.rows)


def simulate(
    world: World,
    requests: Sequence[SimRequest],
    settings: RouterSettings | None = None,
    *,
    seed: int = 0,
    decisions: DecisionFileSettings | None = None,
) -> Result:
    """Run `requests`, in order of arrival, through a dispatcher over `world`; the same call gives the same rows.

    Args:
        seed: of the noise, the errors of the declared speeds and the jitter; policies of one seed meet the same ones.
        decisions: where each request leaves a line, as in a live tier; the simulation begins at second 0 of 1970.
    """
    asked = settings or world.router

    async def run(loop: VirtualLoop) -> Result:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(SimulatedDecisions(decisions, loop.time)) if decisions is not None else None
            return await _Simulation(world, requests, asked, seed, loop, decisions=file).run()

    with logs.at_least(logging.ERROR):  # refusals and overload are what is simulated, and the rows tell of them
        return run_virtually(run)


class _Simulation:
    def __init__(
        self,
        world: World,
        requests: Sequence[SimRequest],
        settings: RouterSettings,
        seed: int,
        loop: VirtualLoop,
        *,
        decisions: DecisionSink | None,
    ) -> None:
        self._world = world
        self._requests = requests
        self._seed = seed
        self._loop = loop
        self._family = world.family
        self._policy = settings.policy
        truths = {str(index): truth for index, truth in enumerate(truths_of(world, requests, seed))}
        self._devices = _devices(world, truths, seed, loop)
        self._clock = LoopClock(loop)
        self._dispatcher = Dispatcher(
            [replica for device in self._devices.values() for replica in device.replicas],
            # Records are read at each request's end: those that wait must not push out one another's.
            msgspec.structs.replace(settings, decision_log=max(settings.decision_log, 4 * settings.max_queue)),
            clock=self._clock,
            decisions=decisions,
            seed=seed,
        )
        schedule_faults(world.faults, self._devices, loop)
        self._rows: list[SimRow | None] = [None] * len(requests)

    async def run(self) -> Result:
        tasks: set[asyncio.Task[None]] = set()
        loop = self._loop
        async with self._dispatcher:
            probers = [loop.create_task(prober.run()) for prober in self._probers()]
            for index, request in enumerate(self._requests):
                delay_s = request.arrival_s - loop.time()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                task = loop.create_task(self._one(index, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.gather(*tasks)
            lasted_s = loop.time()
            await end(*probers)
        devices = [device.host.device for device in self._devices.values()]
        uses = tuple(DeviceUse(d.spec.name, d.spec.slots, d.busy_s, d.most_running) for d in devices)
        return Result(self._policy, self._seed, tuple(row for row in self._rows if row), uses, lasted_s)

    def _probers(self) -> list[Prober]:
        """Return a prober for each remote device to which something happens; others would always be reached."""
        faults, settings = self._world.faults, self._dispatcher.settings
        names = {fault.device for fault in faults.cut} | {fault.device for fault in faults.dead_replica}
        hooks = ProbeHooks(self._dispatcher.probe_succeeded, self._dispatcher.probe_failed)
        interval_s = self._world.report_interval_ms / 1e3
        return [
            Prober(device, interval_s, settings.breaker.failures, hooks, self._clock)
            for name, device in self._devices.items()
            if name in names and device.host.path is not None
        ]

    async def _one(self, index: int, request: SimRequest) -> None:
        """Be the caller of one request, to its end."""
        accepted_s = self._loop.now_s
        sent = InferenceRequest(
            request_id=str(index),
            model=request.model or self._family,
            prompt=_PROMPT,
            sampling=SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos),
            objective=request.objective,
            prompt_tokens=request.prompt_tokens,
            accepted_at_s=accepted_s,
            prompt_bytes=request.wire_bytes,
            caller=request.caller,
            encoded=None if request.token_ids is None else EncodedPrompt(request.token_ids, self),
        )
        answer: Answer | None = None
        got = _Got(self._loop, accepted_s)
        try:
            answer = await self._dispatcher.start(sent)
            async with contextlib.aclosing(answer.chunks) as chunks:
                taps = tapped(chunks)
                if taps is not None:
                    taps.tap(got)
                async for chunk in chunks:
                    got.read(chunk)
        except OverspillError:
            pass  # the record has the outcome
        record = self._dispatcher.decision(sent.request_id, request.caller)
        if record is None:
            raise RuntimeError(f"request {index} left no decision record")
        got.ended_s = self._loop.now_s - accepted_s
        self._rows[index] = _row(index, request, record, answer, got)


class _Got:
    """What a caller gets, and when; seconds since it asked. It takes text past its reader, as a gateway's stream does.

    Attributes:
        full: see `router.values.answer.Tap`: it takes all.
    """

    __slots__ = ("_asked_s", "_loop", "cached_tokens", "ended_s", "first_s", "full", "last_s", "tokens")

    def __init__(self, loop: VirtualLoop, asked_s: float) -> None:
        self._loop = loop
        self._asked_s = asked_s
        self.full = False
        self.tokens = 0
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.ended_s = 0.0
        self.cached_tokens: int | None = None

    def give(self, chunks: list[TokenChunk]) -> None:
        """See `router.values.answer.Tap`."""
        for chunk in chunks:
            self.read(chunk)

    def read(self, chunk: TokenChunk) -> None:
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        if chunk.tokens:
            self.last_s = self._loop.now_s - self._asked_s
            self.first_s = self.last_s if self.first_s is None else self.first_s
            self.tokens += chunk.tokens


def _row(index: int, request: SimRequest, record: DecisionRecord, answer: Answer | None, got: _Got) -> SimRow:
    choice = record.choice if answer is not None else None
    served = choice.candidate.info if choice is not None else None
    outcome = record.outcome.value if record.outcome is not None else Outcome.FAILED.value
    whole = got.tokens >= request.asked_tokens and outcome in {"completed", "degraded"}
    share = _share_of_value(request.objective, got) if whole else 0.0
    first = record.choice.candidate.prediction if record.choice is not None else None
    sent_ms = record.sent_ms
    return SimRow(
        index=index,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        answer_tokens=request.answer_tokens,
        kind=request.kind,
        outcome=outcome,
        reason=choice.reason if choice is not None else "",
        variant=served.variant if served is not None else "",
        tier=served.tier if served is not None else "",
        quality=served.quality if served is not None else 0.0,
        ttft_s=got.first_s,
        finish_s=got.last_s if whole and got.last_s is not None else got.ended_s,
        tokens=got.tokens,
        whole=whole,
        kept=share == 1.0,
        value=request.weight * served.quality * share if served is not None else 0.0,
        decisions=record.decisions,
        predicted_ttft_s=record.promised_ttft_s,
        predicted_ttft_high_s=record.promised_ttft_high_s,
        predicted_finish_s=None if first is None else first.finish_s,
        predicted_finish_high_s=None if first is None else first.finish_high_s,
        last_s=got.last_s,
        cached_tokens=got.cached_tokens,
        bound_s=None if served is None or sent_ms is None else sent_ms / 1e3,
        told=first if served is not None else None,
    )


def _share_of_value(asked: Objective, got: _Got) -> float:
    """Return what a whole answer is worth to its caller: 1 with every promise kept, less after a deadline."""
    if got.first_s is None or got.last_s is None:
        return 0.0
    if asked.ttft_s is not None and got.first_s > asked.ttft_s + _ROUNDING_S:
        return 0.0
    if asked.tpot_s is not None and got.last_s - got.first_s > asked.tpot_s * (got.tokens - 1) + _ROUNDING_S:
        return 0.0
    return asked.value_at(got.last_s - _ROUNDING_S)


def truths_of(world: World, requests: Sequence[SimRequest], seed: int) -> list[Truth]:
    """Draw the noise of every request; no policy changes what another one would draw."""
    draws = np.random.default_rng([seed, 0]).standard_normal((len(requests), 3))
    jitter = max((device.link.jitter for device in world.devices if device.remote), default=0.0)
    factors = np.exp(draws * (world.noise.sigma, world.noise.sigma, jitter)).tolist()
    return [
        Truth(request.answer_tokens, prefill, pace, rtt, request.answer_ids)
        for request, (prefill, pace, rtt) in zip(requests, factors, strict=True)
    ]


def _devices(world: World, truths: dict[str, Truth], seed: int, loop: VirtualLoop) -> dict[str, SimDevice]:
    """Return the devices by name, with the errors of their declared speeds drawn."""
    errors = np.random.default_rng([seed, 1])
    ladder = sorted({rung.quality for spec in world.devices for rung in spec.rungs}, reverse=True)
    made = {}
    for spec in world.devices:
        interval_s = world.report_interval_ms / 1e3
        path = NetworkPath(spec.link, spec.endpoint_key, interval_s, loop) if spec.remote else None
        host = Host(Device(spec, loop), path, Reachability())
        replicas = []
        for index, rung in enumerate(spec.rungs):
            error = world.noise.prior_error_sigma * errors.standard_normal(2)
            prior = SpeedPrior(
                prefill_tokens_per_s=rung.prefill_tokens_per_s * math.exp(error[0]),
                decode_tokens_per_s=1e3 / rung.step_ms * math.exp(error[1]),
                decode_batch_slope=rung.batch_slope,
                source="simulation",
            )
            info = _info(world, spec, rung, ladder.index(rung.quality), prior)
            replicas.append(SimReplica(info, host, index, truths))
        made[spec.name] = SimDevice(host, replicas)
    by_machine: dict[str, list[Device]] = {}
    for one in made.values():
        device = one.host.device
        if device.spec.machine:
            by_machine.setdefault(device.spec.machine, []).append(device)
    for together in by_machine.values():
        for device in together:
            device.share_machine([other for other in together if other is not device])
    return made


def _info(world: World, device: DeviceSpec, rung: RungSpec, position: int, prior: SpeedPrior) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"{device.name}/{rung.variant}",
        endpoint=device.endpoint_key,
        tier="cloud" if device.remote else "edge",
        remote=device.remote,
        family=rung.family or world.family,
        variant=rung.variant,
        rung=position,
        quality=rung.quality,
        context_tokens=rung.context_tokens,
        prior=prior,
        device=device.name,
    )
