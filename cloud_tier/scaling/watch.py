"""What `/v1/scale` and `overspill_desired_replicas` tell: a live tier's requests and replicas, once a second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import structlog

from cloud_tier.scaling.scaler import Advice, PoolLoad, Scaler
from cloud_tier.scaling.settings import ScalingSettings
from cloud_tier.scaling.standby import PREFIX, Standby
from router.base.clock import Clock
from router.dispatch.records.record import DecisionRecord
from router.values.replica import Replica, ReplicaInfo, ReplicaSnapshot
from router.values.request import InferenceRequest, Objective, Outcome
from router.values.settings import RouterSettings

log = structlog.get_logger("cloud_tier")

LOOK_EVERY_S = 1.0
TIER = "tier"
"""What the one pool is called where a replica is a whole tier."""


class Tier(Protocol):
    """What is asked of `router.dispatch.dispatcher.Dispatcher`."""

    settings: RouterSettings

    def load(self) -> Sequence[ReplicaSnapshot]:
        """Return a snapshot of every replica."""
        ...

    def tell_of_requests(
        self, came: Callable[[InferenceRequest], None], ended: Callable[[DecisionRecord], None]
    ) -> None:
        """Call `came` for each request, and `ended` once it has left."""
        ...


class _Pool:
    """The replicas that one model, or all of a tier, is served by.

    Attributes:
        inside: requests that may ask for more of them; in_slack: others that the replicas count; lines: those that they
            count only where they do not hold them up.
    """

    def __init__(self, scaler: Scaler) -> None:
        self.scaler = scaler
        self.inside = self.in_slack = self.lines = 0
        self.slots = 1
        self.like: ReplicaInfo | None = None
        self.advice: Advice | None = None


def _nobody() -> None:
    """Nobody has to publish replicas again."""


class ScaleWatch:
    """Says how many replicas there should be. `run` it beside the dispatcher.

    Args:
        on_change: called when `stand_in` has another answer than before.
    """

    def __init__(
        self, tier: Tier, settings: ScalingSettings, clock: Clock, on_change: Callable[[], None] = _nobody
    ) -> None:
        self._on_change = on_change
        self._absent: set[str] = set()  # models that could go to no replica, and have none that serves
        self._tier = tier
        self._settings = settings
        self._clock = clock
        self._pools: dict[str, _Pool] = {}
        self._pool_of: dict[str, str] = {}  # by every name that a request may ask for
        if settings.unit == TIER:
            self._pools[TIER] = self._pool()
        tier.tell_of_requests(self._came, self._ended)

    def _pool(self) -> _Pool:
        ttft_s = self._tier.settings.ttft_slo_ms / 1e3
        return _Pool(Scaler(self._settings, self._clock.now_s(), default_ttft_s=ttft_s))

    async def run(self) -> None:
        """Look once a second until cancelled."""
        while True:
            try:
                self.look()
            except Exception:  # the task's boundary: one bad look must not end them all
                log.exception("scaling crashed")
            await self._clock.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Bring every advice up to date."""
        snapshots = [s for s in self._tier.load() if not s.info.replica_id.startswith(PREFIX)]
        by_pool: dict[str, list[ReplicaSnapshot]] = {name: [] for name in self._pools}
        for snapshot in snapshots:
            by_pool.setdefault(self._know(snapshot.info), []).append(snapshot)
        for name, theirs in by_pool.items():
            self._advise(self._pools[name], theirs)
        if self._holds:
            absent = {name for name, theirs in by_pool.items() if not any(s.available for s in theirs)}
            if absent != self._absent:
                self._absent = absent
                self._on_change()

    @property
    def _holds(self) -> bool:
        """Whether requests wait for a model without replicas, rather than being refused."""
        return self._settings.unit != TIER and self._settings.min_replicas == 0

    def _know(self, info: ReplicaInfo) -> str:
        """Return the name of a replica's pool, which is made with its first one."""
        name = TIER if self._settings.unit == TIER else info.family
        self._pool_of[info.family] = self._pool_of[info.variant] = name
        if name not in self._pools:
            self._pools[name] = self._pool()
        return name

    def _advise(self, pool: _Pool, snapshots: Sequence[ReplicaSnapshot]) -> None:
        settings = self._tier.settings
        pool.scaler.default_ttft_s = settings.ttft_slo_ms / 1e3
        if snapshots:
            pool.like = max((s.info for s in snapshots), key=lambda info: info.quality)
        whole = self._settings.unit == TIER
        seen = _seen(snapshots, pool.slots, whole=whole)
        pool.slots = seen.slots
        shown = pool.in_slack + (0 if all(s.info.holds_up for s in snapshots) else pool.lines)
        busy = max(0, sum(s.running + s.queued for s in snapshots) - shown)
        queued = min(busy, sum(s.queued for s in snapshots))
        seen = msgspec.structs.replace(
            seen, running=busy - queued, waiting=max(0, pool.inside - busy) + queued, most_waiting=settings.max_queue
        )
        pool.advice = pool.scaler.advise(self._clock.now_s(), seen)

    def absent(self) -> list[ReplicaInfo]:
        """Return what requests are held for now: a replica of each such model, as it was."""
        if not self._holds:
            return []
        return [pool.like for name, pool in self._pools.items() if pool.like and name in self._absent]

    def stand_in(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Return the replicas, and a stand-in for each model that has none which serves, but may go to none."""
        live = list(replicas)
        for replica in live:
            self._know(replica.info)
        if not self._holds:
            return live
        serving = {replica.info.family for replica in live if replica.snapshot().available}
        self._absent = set(self._pools) - serving
        absent = [(pool.like, pool) for name, pool in self._pools.items() if pool.like and name in self._absent]
        return [*live, *(Standby(like, pool.slots, partial(self._ready_in_s, pool.scaler)) for like, pool in absent)]

    def _ready_in_s(self, scaler: Scaler) -> float:
        return scaler.ready_in_s(self._clock.now_s())

    def report(self, model: str | None = None) -> Mapping[str, object] | None:
        """Return what is told of one model, or of all; None of a model of which nothing is known."""
        told = {name: _told(pool.advice) for name, pool in self._pools.items() if pool.advice is not None}
        if model is not None:
            return told.get(self._pool_of.get(model, model))
        if self._settings.unit == TIER:
            return told.get(TIER)
        advices = [pool.advice for pool in self._pools.values() if pool.advice is not None]
        return {
            "desired": sum(advice.desired for advice in advices),
            "now": sum(advice.now for advice in advices),
            "starting": sum(advice.starting for advice in advices),
            "load": round(sum(advice.load for advice in advices), 4),
            "why": "; ".join(f"{name}: {pool.advice.why}" for name, pool in self._pools.items() if pool.advice)
            or "no replica was seen yet",
            "models": told,
        }

    def desired(self) -> Iterator[tuple[tuple[str], float]]:
        """Return each pool's name and how many replicas it should have, for the gauge."""
        return (((name,), float(pool.advice.desired)) for name, pool in self._pools.items() if pool.advice)

    def loads(self) -> Iterator[tuple[tuple[str], float]]:
        """Return each pool's name and what it needs, in replicas and parts of one."""
        return (((name,), pool.advice.load) for name, pool in self._pools.items() if pool.advice)

    def _came(self, request: InferenceRequest) -> None:
        pool, asked = self._of(request.model), request.objective
        if pool is not None and self._is_slack(asked):
            pool.lines += asked.yields
            pool.in_slack += not asked.yields
        elif pool is not None:
            pool.inside += 1
            pool.scaler.demand.came(self._clock.now_s(), asked.ttft_s, asked.deadline_s)

    def _ended(self, record: DecisionRecord) -> None:
        pool = self._of(record.model)
        if pool is not None and self._is_slack(record.objective):
            yields = record.objective.yields
            pool.lines = max(0, pool.lines - yields)
            pool.in_slack = max(0, pool.in_slack - (not yields))
            return
        if pool is None or pool.inside == 0:
            return
        pool.inside -= 1
        if record.outcome is Outcome.INVALID:
            pool.scaler.demand.was_invalid()
        if record.sent_ms is not None and record.finish_s is not None:
            sent_s = record.sent_ms / 1e3
            first_s = None if record.ttft_s is None else record.ttft_s - sent_s
            pool.scaler.demand.ended(record.finish_s - sent_s, first_s)

    def _is_slack(self, asked: Objective) -> bool:
        """Whether a request runs in what is there for others."""
        return asked.in_slack and not self._settings.batches

    def _of(self, model: str) -> _Pool | None:
        return self._pools.get(TIER if self._settings.unit == TIER else self._pool_of.get(model, ""))


def _seen(snapshots: Sequence[ReplicaSnapshot], slots: int, *, whole: bool) -> PoolLoad:
    """Count replicas and slots.

    Args:
        slots: of one, as last known.
        whole: all of them together are one.
    """
    devices: dict[str, list[ReplicaSnapshot]] = {}
    for snapshot in snapshots:
        devices.setdefault(snapshot.info.device_key, []).append(snapshot)
    each = [max(s.slots for s in theirs) for theirs in devices.values()]
    ready = sum(any(s.available for s in theirs) for theirs in devices.values())
    back = [s.back_in_s for s in snapshots if not s.available and s.back_in_s > 0.0]
    known = [count for count in each if count > 0]
    if known:
        slots = sum(known) if whole else round(sum(known) / len(known))
    slopes = [s.info.prior.decode_batch_slope for s in snapshots]
    return PoolLoad(
        ready=min(ready, 1) if whole else ready,
        starting=int(not ready) if whole else len(devices) - ready,
        slots=slots,
        running=0,
        waiting=0,
        slope=sum(slopes) / len(slopes) if slopes else 0.0,
        ready_in_s=min(back, default=None),
    )


def _told(advice: Advice) -> dict[str, object]:
    return {
        "desired": advice.desired,
        "now": advice.now,
        "starting": advice.starting,
        "load": round(advice.load, 4),
        "why": advice.why,
        "ready_in_s": None if advice.ready_in_s is None else round(advice.ready_in_s, 2),
        "inputs": dict(advice.inputs),
    }
