"""A fleet of light devices over one cloud tier, on virtual time: the world of `benchmarks/reconnect.py`.

Real: the cloud's dispatcher with its queue and its credits, the load report as it goes over the wire, and on each
device the account of credits and the schedule of polls. Made up: engines that take a drawn time, the network, who asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.base.errors import OverspillError, Refused, ReplicaUnreachable
from router.dispatch.dispatcher import Dispatcher
from router.signals.credit_account import CreditAccount, HeldCredits
from router.simulation.loop import LoopClock, VirtualLoop
from router.upstream.servers.poll_schedule import PollSchedule
from router.values.chunk import FinishReason, TokenChunk
from router.values.credits import Asker, Want
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import CreditSettings, RouterSettings
from router.wire.load import LoadReport, decode_orca, encode_orca, summarise

FAMILY = "model"
VARIANT = "model-fp32"
_PROMPT = TextPrompt("")
_PREFILL_SHARE = 0.1
_ANSWER_TOKENS = 50
_PROBE_TIMEOUT_S = 3.0
_MISSES = 3  # probes in a row until an upstream is lost: `router.breaker.failures`
_RETRANSMITTED_S = 1.0  # a probe sent while the link was cut arrives within so long of its return, if it still waits
_POLL_S = 1.0
_OLD_COOLING_S = (0.05, 30.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to the fleet.

    Attributes:
        utilisation: share of the cloud's capacity that the fleet's overflow takes in steady state.
        service_s: mean time that a request holds a slot; its logarithm has the deviation `service_sigma`.
        steady_s, cut_s, after_s: lengths of the three acts; figures of the first are taken from `warm_up_s` on.
        work_for_all: every device has at least one request waiting when the link is back.
        max_queue: of the cloud.
    """

    credits: bool
    devices: int
    slots: int
    utilisation: float
    service_s: float
    service_sigma: float
    rtt_s: float
    warm_up_s: float
    steady_s: float
    cut_s: float
    after_s: float
    max_queue: int
    seed: int
    work_for_all: bool = True

    @property
    def back_s(self) -> float:
        return self.warm_up_s + self.steady_s + self.cut_s

    @property
    def end_s(self) -> float:
        return self.back_s + self.after_s


@dataclass(slots=True)
class Seen:
    """What was observed; times are virtual seconds.

    Attributes:
        waits: (when it left the queue, seconds in the cloud's queue).
        depths: (when, requests in the cloud's queue), every quarter of a second.
        held: (when, requests that wait on devices), every second.
        done: (when, device, seconds since the request came up there).
        refused: when the cloud turned a request away after its upload; polls: when it answered a poll.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    depths: list[tuple[float, int]] = field(default_factory=list)
    held: list[tuple[float, int]] = field(default_factory=list)
    done: list[tuple[float, int, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    polls: list[float] = field(default_factory=list)


class Engine:
    """`slots` requests at a time, each for a drawn time."""

    def __init__(self, scenario: Scenario, seen: Seen, loop: VirtualLoop) -> None:
        prior = SpeedPrior(1000.0, _ANSWER_TOKENS / scenario.service_s, 0.0)
        self.info = ReplicaInfo("cloud/model", "engine/model", "cloud", False, FAMILY, VARIANT, 0, 1.0, 8192, prior)
        self.link = None
        self._slots = scenario.slots
        self._draw = random.Random(scenario.seed)  # noqa: S311
        sigma = scenario.service_sigma
        self._law = (math.log(scenario.service_s) - sigma * sigma / 2, sigma)
        self._seen = seen
        self._loop = loop
        self._running = 0
        self._snapshot = ReplicaSnapshot(self.info, available=True, slots=self._slots)

    def snapshot(self) -> ReplicaSnapshot:
        if self._snapshot.running != self._running:
            self._snapshot = ReplicaSnapshot(self.info, available=True, slots=self._slots, running=self._running)
        return self._snapshot

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[TokenChunk, None]:
        now_s = self._loop.time()
        self._seen.waits.append((now_s, now_s - request.accepted_at_s))
        took_s = self._draw.lognormvariate(*self._law)
        self._running += 1
        try:
            await asyncio.sleep(_PREFILL_SHARE * took_s)
            yield TokenChunk("x", 1)
            await asyncio.sleep((1 - _PREFILL_SHARE) * took_s)
            yield TokenChunk("x", _ANSWER_TOKENS - 1, finish_reason=FinishReason.STOP)
        finally:
            self._running -= 1


class Cloud:
    """The real dispatcher, and the part of its gateway that devices meet."""

    def __init__(self, scenario: Scenario, seen: Seen, loop: VirtualLoop) -> None:
        settings = RouterSettings(
            max_queue=scenario.max_queue,
            max_sheddable_queue=scenario.max_queue,
            decision_log=256,
            credits=CreditSettings(enabled=scenario.credits),
        )
        self.dispatcher = Dispatcher([Engine(scenario, seen, loop)], settings, clock=LoopClock(loop))
        self.reachable = True
        self._seen = seen
        self._loop = loop
        self._count = 0
        self._last_key = (-1, -1)
        self._last_report: LoadReport | None = None

    def report(self, asker: Asker, want: Want) -> LoadReport | None:
        """Answer a poll."""
        self._seen.polls.append(self._loop.time())
        dispatcher = self.dispatcher
        grant = dispatcher.admission.grant(asker, want)
        load = dispatcher.load()
        key = (load[0].running, dispatcher.waiting)
        if grant is None and key == self._last_key:  # thousands get the same report
            return self._last_report
        report = replace(summarise(load, waiting=dispatcher.waiting), grant=grant)
        self._last_key, self._last_report = key, decode_orca(encode_orca(report))
        return self._last_report

    async def serve(self, asker: Asker) -> None:
        """Answer a request that has arrived.

        Raises:
            OverspillError: it was turned away, or the link was cut under it.
        """
        if not self.reachable:
            raise ReplicaUnreachable("the link is cut")
        self._count += 1
        request = InferenceRequest(
            request_id=str(self._count),
            model=FAMILY,
            prompt=_PROMPT,
            sampling=SamplingParams(max_tokens=_ANSWER_TOKENS),
            objective=Objective(),
            prompt_tokens=64,
            accepted_at_s=self._loop.time(),
            prompt_bytes=256,
        )
        give_back = self.dispatcher.admission.charge(asker)
        try:
            answer = await self.dispatcher.start(request)
        except Refused:
            self._seen.refused.append(self._loop.time())
            give_back()
            raise
        async with contextlib.aclosing(answer.chunks) as chunks:
            async for _ in chunks:
                pass


class LightDevice:
    """A device as its cloud meets it: what overflows, its polls, its credits.

    Attributes:
        waiting: when each request that waits came up; the oldest first.
    """

    def __init__(self, index: int, scenario: Scenario, cloud: Cloud, seen: Seen, loop: VirtualLoop) -> None:
        self.waiting: deque[float] = deque()
        self._index = index
        self._asker = Asker("fleet", f"device-{index}")
        self._scenario = scenario
        self._cloud = cloud
        self._seen = seen
        self._loop = loop
        self._draw = random.Random(f"{scenario.seed}/{index}")  # noqa: S311
        self._rate = scenario.utilisation * scenario.slots / scenario.service_s / scenario.devices
        self._account = CreditAccount(LoopClock(loop), self._draw)
        self._schedule = PollSchedule(_POLL_S, LoopClock(loop), self._account, self._draw)
        self._reachable = False
        self._missed = 0
        self._polling = False
        self._polled_at_s = -math.inf
        self._next_poll = loop.call_later(self._draw.uniform(0, _POLL_S), self._poll)
        self._report: LoadReport | None = None
        self._sent_since = 0
        self._cools_until_s = 0.0
        self._refused_at_s = -math.inf
        self._sent: set[asyncio.Task[None]] = set()
        loop.call_later(self._draw.expovariate(self._rate), self._comes_up)

    async def switch_off(self) -> None:
        """End what it does."""
        self._reachable = False
        sent = list(self._sent)
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)

    def lose_link(self) -> None:
        """Break off what is in flight: it will be sent again."""
        for task in self._sent:
            task.cancel()

    def _comes_up(self) -> None:
        """A request that the device cannot serve itself."""
        self._loop.call_later(self._draw.expovariate(self._rate), self._comes_up)
        self.add_work()

    def add_work(self) -> None:
        self.waiting.append(self._loop.time())
        self._send_what_may_go()
        if self.waiting and self._reachable and self._schedule.wants_poll() and not self._polling:
            self._next_poll.cancel()
            since_s = self._loop.time() - self._polled_at_s
            pause_s = max(0.0, self._schedule.soonest_s - since_s)
            self._next_poll = self._loop.call_later(pause_s + self._scenario.rtt_s / 2, self._poll)

    # ── polls ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _poll(self) -> None:
        """A poll that was sent half a round trip ago arrives."""
        self._polling = True
        self._poll_arrives(self._loop.time() - self._scenario.rtt_s / 2)

    def _poll_arrives(self, asked_at_s: float) -> None:
        if not self._cloud.reachable:
            gives_up_s = asked_at_s + _PROBE_TIMEOUT_S
            if gives_up_s < self._scenario.back_s:
                self._loop.call_at(gives_up_s, self._poll_missed)
            else:
                late_s = self._draw.uniform(0, _RETRANSMITTED_S)
                self._loop.call_at(self._scenario.back_s + late_s, self._poll_arrives, asked_at_s)
            return
        want = Want(len(self.waiting))
        report = self._cloud.report(self._asker, want)
        if self.waiting:
            self._loop.call_later(self._scenario.rtt_s / 2, self._poll_answered, asked_at_s, want.waiting, report)
        else:  # nothing hangs on it: an event less
            self._poll_answered(asked_at_s, want.waiting, report)

    def _poll_missed(self) -> None:
        self._missed += 1
        if self._missed >= _MISSES:
            self._reachable = False
        self._polling_ends()

    def _poll_answered(self, asked_at_s: float, wanted: int, report: LoadReport | None) -> None:
        self._missed, self._reachable = 0, True
        self._report, self._sent_since = report, 0
        if report is not None:
            self._account.told(report.grant, asked_at_s, wanted)
            if self._refused_at_s < asked_at_s and report.running + report.queued < report.slots:
                self._cools_until_s = 0.0  # news of a free slot ends a cool-down
        self._send_what_may_go()
        self._polling_ends()

    def _polling_ends(self) -> None:
        self._polling = False
        self._polled_at_s = self._loop.time()
        pause_s = _POLL_S
        if self._scenario.credits:
            wants = bool(self.waiting) and not self._account.in_line
            busy = wants or self._missed > 0 or bool(self._sent)
            pause_s = self._schedule.pause_s(reachable=self._reachable, busy=busy)
        self._next_poll = self._loop.call_later(pause_s + self._scenario.rtt_s / 2, self._poll)

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_what_may_go(self) -> None:
        while self.waiting and self._may_send():
            self._sent_since += 1
            held = self._account.spend()
            task = self._loop.create_task(self._send(self.waiting.popleft(), held))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)

    def _may_send(self) -> bool:
        """Whether there is a credit; where none are issued, whether the last report and what was sent leave a slot."""
        report = self._report
        if not self._reachable or report is None or self._loop.time() < self._cools_until_s:
            return False
        credits_left = self._account.available()
        if credits_left is not None:
            return credits_left > 0
        return report.running + report.queued + self._sent_since < report.slots

    async def _send(self, came_up_s: float, held: HeldCredits | None) -> None:
        half_s = self._scenario.rtt_s / 2
        try:
            await asyncio.sleep(half_s)
            await self._cloud.serve(self._asker)
            await asyncio.sleep(half_s)
        except Refused as refusal:
            if held is not None:
                self._account.give_back(held)
            least_s, most_s = _OLD_COOLING_S
            self._refused_at_s = self._loop.time()
            self._cools_until_s = self._refused_at_s + min(max(refusal.retry_after_s, least_s), most_s)
            self._loop.call_at(self._cools_until_s, self._send_what_may_go)
            self._take_back(came_up_s)
        except (OverspillError, asyncio.CancelledError):
            self._take_back(came_up_s)
        else:
            now_s = self._loop.time()
            self._seen.done.append((now_s, self._index, now_s - came_up_s))

    def _take_back(self, came_up_s: float) -> None:
        self.waiting.appendleft(came_up_s)


async def live_through(scenario: Scenario, loop: VirtualLoop) -> Seen:
    """Let the fleet live through its acts; returns what was seen."""
    seen = Seen()
    cloud = Cloud(scenario, seen, loop)
    async with cloud.dispatcher:
        fleet = [LightDevice(index, scenario, cloud, seen, loop) for index in range(scenario.devices)]
        watch = [
            loop.create_task(_watch(0.25, lambda: seen.depths.append((loop.time(), cloud.dispatcher.waiting)))),
            loop.create_task(_watch(1.0, lambda: seen.held.append((loop.time(), sum(len(d.waiting) for d in fleet))))),
        ]
        await asyncio.sleep(scenario.warm_up_s + scenario.steady_s)
        cloud.reachable = False
        for device in fleet:
            device.lose_link()
        await asyncio.sleep(scenario.cut_s)
        cloud.reachable = True
        if scenario.work_for_all:
            for device in fleet:
                if not device.waiting:
                    device.add_work()
        await asyncio.sleep(scenario.after_s)
        for task in watch:
            task.cancel()
        for device in fleet:
            await device.switch_off()
    return seen


async def _watch(every_s: float, look: Callable[[], None]) -> None:
    while True:
        look()
        await asyncio.sleep(every_s)
