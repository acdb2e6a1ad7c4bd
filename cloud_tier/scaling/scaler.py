"""How many replicas there should be: the law over time, with hysteresis and cold starts.

Up at once, since who waits for a replica waits for its cold start too. Down to the most that the lasting load needed
within the last `hold_s`: whoever gives a replica back that is soon needed again pays for its start twice (Gandhi et
al., AutoScale, 2012). What a rise or a backlog asked for beyond that goes with them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec

from cloud_tier.scaling.demand import Demand
from cloud_tier.scaling.law import Work, service_at_full_s, slots_for_backlog, slots_for_promises
from cloud_tier.scaling.settings import ScalingSettings

_TOLERANCE = 0.1  # of a replica, by which a need may pass a whole number
_LEARNS = 0.5  # weight of a new cold start; the first one replaces the guess
_COLD_START_BOUNDS = (0.1, 10.0)  # of the configured one, between which a measured one is believed
_LEAST_SERVICE_S = 1e-3
_OVERDUE = 2.0  # cold starts after which a replica that was asked for is no longer counted on


class PoolLoad(msgspec.Struct, frozen=True):
    """The replicas of one model at one moment.

    Attributes:
        ready, starting: replicas that serve, and that will.
        slots: of one replica.
        running: answers in slots of any of them; waiting: requests for which there was none.
        slope: growth of a decode step for each further sequence.
        ready_in_s: until the first of `starting` serves; None where nobody knows.
        most_waiting: longer queues are shed.
    """

    ready: int
    starting: int
    slots: int
    running: int
    waiting: int
    slope: float = 0.0
    ready_in_s: float | None = None
    most_waiting: int = 1_000_000


class Advice(msgspec.Struct, frozen=True):
    """What an autoscaler is told.

    Attributes:
        desired: replicas that there should be.
        now: that there are, those included that are starting.
        load: what is needed, in replicas and parts of one, before hysteresis and bounds.
        why: in words.
        ready_in_s: until the next replica should serve, where one is starting or was asked for.
        inputs: every figure that went into it.
    """

    desired: int
    now: int
    starting: int
    load: float
    why: str
    ready_in_s: float | None
    inputs: Mapping[str, float]


class Scaler:
    """Says how many replicas one model needs. Tell `demand` of its requests, and ask `advise` once a second.

    Args:
        default_ttft_s: the promise of requests that name none.
        service_s: guess of an answer's seconds in a slot.
    """

    def __init__(
        self, settings: ScalingSettings, now_s: float, *, default_ttft_s: float, service_s: float = 5.0
    ) -> None:
        self.settings = settings
        self.demand = Demand(now_s, service_s)
        self.default_ttft_s = default_ttft_s
        self.cold_start_s = settings.cold_start_s
        self._measured = False
        self._needed: deque[tuple[float, int]] = deque()  # by time; needs fall from first to last
        self._asked_s: dict[int, float] = {}  # number of replicas → since when there should be so many
        self._ready = 0
        self._told_until_s = -math.inf  # when a replica that starts said it would serve

    def advise(self, now_s: float, seen: PoolLoad) -> Advice:
        """Return how many replicas there should be now."""
        demand, settings = self.demand, self.settings
        replicas = max(1, seen.ready)
        demand.look(now_s, seen.running, seen.running / replicas)
        self._watch_starts(now_s, seen)
        share = settings.promise_share
        work = self._work(now_s, seen)
        promised, backlog = slots_for_promises(work, share), slots_for_backlog(work)
        load = max(promised, backlog) / seen.slots
        needed = self._bounded(math.ceil(load - _TOLERANCE), now_s, seen)
        steady = slots_for_promises(msgspec.structs.replace(work, arrivals_per_s=demand.arrivals_per_s), share)
        lasting = self._bounded(math.ceil(steady / seen.slots - _TOLERANCE), now_s, seen)
        desired = max(needed, self._held(lasting, now_s, seen))
        self._ask(desired, now_s, seen)
        self._told_until_s = -math.inf if seen.ready_in_s is None else now_s + seen.ready_in_s
        return Advice(
            desired=desired,
            now=seen.ready + seen.starting,
            starting=seen.starting,
            load=load,
            why=self._why(desired, needed, load, seen, work),
            ready_in_s=self.ready_in_s(now_s) if self._asked_s else None,
            inputs=self._inputs(work, seen, promised, backlog),
        )

    def _work(self, now_s: float, seen: PoolLoad) -> Work:
        """Say what a replica that is asked for now would find when it serves; those that start meanwhile count."""
        demand, ahead_s = self.demand, self.cold_start_s
        service_s = max(_LEAST_SERVICE_S, service_at_full_s(demand.service_s, demand.batch, seen.slots, seen.slope))
        arrivals_per_s = demand.forecast_per_s(ahead_s)
        starts_in_s = [self._left_s(asked_s, now_s) for asked_s in self._asked_s.values()]
        serving = seen.ready + sum(1.0 - left_s / ahead_s for left_s in starts_in_s)
        slots = serving * seen.slots
        served = max(0.0, slots - seen.running) + slots * ahead_s / service_s
        backlog = min(seen.waiting + arrivals_per_s * ahead_s - served, seen.most_waiting)
        return Work(
            arrivals_per_s=arrivals_per_s,
            service_s=service_s,
            variability=demand.variability,
            budget_s=demand.budget_s(self.default_ttft_s),
            drain_s=ahead_s,
            running=seen.running,
            backlog=max(0.0, backlog),
        )

    def _left_s(self, asked_s: float, now_s: float) -> float:
        """Return seconds until a replica that was asked for serves; one that is long overdue may never come."""
        passed_s = now_s - asked_s
        return self.cold_start_s if passed_s > _OVERDUE * self.cold_start_s else max(0.0, self.cold_start_s - passed_s)

    def _bounded(self, needed: int, now_s: float, seen: PoolLoad) -> int:
        settings, came_s = self.settings, self.demand.last_came_s
        busy = seen.running + seen.waiting > 0 or (came_s is not None and now_s - came_s < settings.idle_s)
        if not busy and not settings.min_replicas:
            return 0
        least = max(settings.min_replicas, 1)
        return min(max(needed + settings.spare_replicas, least), settings.max_replicas)

    def _held(self, needed: int, now_s: float, seen: PoolLoad) -> int:
        """Return the most that was needed within `hold_s`."""
        past = self._needed
        while past and past[-1][1] <= needed:
            past.pop()
        past.append((now_s, needed))
        while past[0][0] < now_s - self.settings.hold_s:
            past.popleft()
        idle = needed == 0 and seen.running + seen.waiting == 0
        if idle:  # `idle_s` has passed: long enough
            past.clear()
            past.append((now_s, 0))
        return past[0][1]

    def _watch_starts(self, now_s: float, seen: PoolLoad) -> None:
        """Learn how long a replica takes from being asked for until it serves."""
        low, high = (bound * self.settings.cold_start_s for bound in _COLD_START_BOUNDS)
        for count in range(self._ready + 1, seen.ready + 1):
            asked_s = self._asked_s.pop(count, None)
            if asked_s is not None and low <= now_s - asked_s <= high:
                self.cold_start_s += (_LEARNS if self._measured else 1.0) * (now_s - asked_s - self.cold_start_s)
                self._measured = True
        self._ready = seen.ready

    def _ask(self, desired: int, now_s: float, seen: PoolLoad) -> None:
        for count in range(seen.ready + 1, desired + 1):
            self._asked_s.setdefault(count, now_s)
        for count in [count for count in self._asked_s if count > desired or count <= seen.ready]:
            del self._asked_s[count]

    def ready_in_s(self, now_s: float) -> float:
        """Return seconds until the next replica serves that is asked for, or would be asked for now."""
        asked_s = min(self._asked_s.values(), default=now_s)
        told_s = self._told_until_s - now_s
        return max(0.0, told_s if told_s > 0.0 else asked_s + self.cold_start_s - now_s)

    def _why(self, desired: int, needed: int, load: float, seen: PoolLoad, work: Work) -> str:
        share = f"{100 * self.settings.promise_share:g} %"
        text = (
            f"{work.arrivals_per_s:.2f} requests a second for {work.service_s:.1f} s each, {share} of them to begin "
            f"within {work.budget_s:.1f} s"
        )
        if work.backlog > 0:
            text += f", and {work.backlog:.0f} that will wait when a new replica serves in {self.cold_start_s:.0f} s"
        text += f", need {load:.2f} replicas of {seen.slots} slots"
        if self.settings.spare_replicas:
            text += f", and {self.settings.spare_replicas} to spare"
        if desired > needed:
            return f"{text}; held at {desired} for {self.settings.hold_s:.0f} s after the last need"
        if needed == 0:
            return f"no request for {self.settings.idle_s:.0f} s"
        if needed != max(0, math.ceil(load - _TOLERANCE)) + self.settings.spare_replicas:
            text += f"; the bounds are {self.settings.min_replicas} to {self.settings.max_replicas}"
        return text

    def _inputs(self, work: Work, seen: PoolLoad, promised: int, backlog: float) -> dict[str, float]:
        demand = self.demand
        figures: dict[str, float] = {
            "waiting": seen.waiting,
            "running": seen.running,
            "ready": seen.ready,
            "starting": seen.starting,
            "slots_a_replica": seen.slots,
            "arrivals_per_s": demand.arrivals_per_s,
            "forecast_per_s": work.arrivals_per_s,
            "service_s": work.service_s,
            "variability": work.variability,
            "wait_budget_s": work.budget_s,
            "cold_start_s": self.cold_start_s,
            "expected_backlog": work.backlog,
            "slots_for_promises": promised,
            "slots_for_backlog": backlog,
        }
        return {name: round(value, 4) for name, value in figures.items()}
