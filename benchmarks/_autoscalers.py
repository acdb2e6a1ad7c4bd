"""The law behind `/v1/scale` and the usual autoscalers, and the replica of which they say how many there should be."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from cloud_tier.scaling.scaler import PoolLoad, Scaler
from cloud_tier.scaling.settings import ScalingSettings
from router.simulation.values import SimRequest
from router.simulation.world import DeviceSpec, RungSpec
from router.values.settings import RouterSettings

RUNG = RungSpec(
    variant="model-bf16",
    quality=1.0,
    prefill_tokens_per_s=8_000,
    step_ms=18,
    batch_slope=0.08,
    context_tokens=16_384,
)
REPLICA = DeviceSpec(name="replica", slots=8, rungs=(RUNG,), prefill_share=0.8, decode_share=0.3)
TTFT_S = RouterSettings().ttft_slo_ms / 1e3  # what requests are promised that ask for nothing


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
