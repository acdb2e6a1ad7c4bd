"""What waits and what runs at this moment: for the gauges that autoscalers read, and for `/v1/status`.

Counted by what this tier has accepted and sent itself, which is true at every moment; a replica's own report comes
later, and may count the requests of others. It only tells which of the requests there it has not begun yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import final

from router.dispatch.assessment.readiness import readiness_of
from router.dispatch.binding.binder import Binder
from router.dispatch.records.telemetry import Telemetry
from router.signals.signals import Signals
from router.values.readiness import Readiness
from router.values.replica import Replica, ReplicaSnapshot, Unreached
from router.values.status import ReplicaStatus, RouterStatus, facts_of

Sample = tuple[tuple[str, ...], float]


@final
class StatusBoard:
    """Reads the queue, the attempts in flight and the replicas; changes none of them."""

    def __init__(self, binder: Binder, signals: Signals) -> None:
        self._binder = binder
        self._signals = signals

    def read(self, policy: str) -> RouterStatus:
        """Return all of it."""
        replicas = tuple(self._replica(replica) for replica in self._replicas())
        queued = len(self._binder.queue)
        return RouterStatus(
            policy=policy,
            waiting=queued + sum(replica.waiting for replica in replicas),
            queued=queued,
            running=sum(replica.running for replica in replicas),
            overloaded=self._signals.ladder.overloaded,
            replicas=replicas,
            unreached=tuple(_unreached(source) for source in self._binder.pool.sources()),
        )

    def readiness(self, asker: str = "") -> Readiness:
        """Return whether any replica could take a request now, of those that do not lead back to `asker`."""
        return readiness_of(self._binder.pool, asker)

    def watch(self, telemetry: Telemetry) -> None:
        """Register the gauges; each has a value from the start, since an autoscaler takes none for a failure."""
        labels = ("model_name", "replica")
        telemetry.watch(
            "overspill_num_requests_waiting",
            "Accepted requests that no replica has begun: in the tier's queue (`replica` is empty, `model_name` what "
            "was asked for; none in the slack of others), and inside each replica.",
            labels,
            self._waiting,
        )
        telemetry.watch(
            "overspill_num_requests_running",
            "Requests that a replica has begun, those that go to a tier above included.",
            labels,
            self._running,
        )
        telemetry.watch(
            "overspill_kv_cache_usage_perc",
            "Used share of a replica's KV cache; 1 is full.",
            labels,
            self._kv_usage,
        )
        telemetry.watch(
            "overspill_replica_available",
            "1 while a replica calls itself able to take requests.",
            labels,
            lambda: [(_labels(replica), float(replica.snapshot().available)) for replica in self._replicas()],
        )
        telemetry.watch(
            "overspill_overloaded",
            "1 while quality is given up for promises.",
            (),
            lambda: [((), float(self._signals.ladder.overloaded))],
        )

    def _replicas(self) -> Iterable[Replica]:
        return self._binder.pool.replicas.values()

    def _waiting(self) -> Iterator[Sample]:
        families = {replica.info.family for replica in self._replicas()}
        asked_for = Counter(dict.fromkeys(families or {""}, 0))
        asked_for.update(entry.request.model for entry in self._binder.queue if not entry.in_slack)
        for model, number in asked_for.items():
            yield (model, ""), float(number)
        for replica in self._replicas():
            yield _labels(replica), float(self._inside(replica.snapshot())[1])

    def _running(self) -> Iterator[Sample]:
        for replica in self._replicas():
            yield _labels(replica), float(self._inside(replica.snapshot())[0])

    def _kv_usage(self) -> Iterator[Sample]:
        for replica in self._replicas():
            used = facts_of(replica).kv_usage
            if used is not None:
                yield _labels(replica), used

    def _inside(self, snapshot: ReplicaSnapshot) -> tuple[int, int]:
        """Requests of this tier on a replica: (begun, waiting inside).

        As many wait as it says do there, but of those that are this tier's only such without any text yet.
        """
        in_flight, name = self._signals.in_flight, snapshot.info.replica_id
        waiting = min(snapshot.queued, in_flight.without_text(name))
        return in_flight.count(name) - waiting, waiting

    def _replica(self, replica: Replica) -> ReplicaStatus:
        info, load = replica.info, replica.snapshot()
        running, waiting = self._inside(load)
        breaker, breaker_why = self._signals.health.breaker_told(info)
        return ReplicaStatus(
            replica=info.replica_id,
            endpoint=info.endpoint,
            device=info.device_key,
            backend=info.backend,
            tier=info.tier,
            family=info.family,
            variant=info.variant,
            rung=info.rung,
            quality=info.quality,
            context_tokens=info.context_tokens,
            remote=info.remote,
            available=load.available,
            why=load.why,
            back_in_s=round(load.back_in_s, 3),
            slots=load.slots,
            running=running,
            waiting=waiting,
            load_running=load.running,
            load_queued=load.queued,
            queued_prefill_tokens=load.queued_prefill_tokens,
            pending_decode_tokens=load.pending_decode_tokens,
            kv_free_tokens=load.kv_free_tokens,
            load_age_s=round(load.age_s, 3),
            breaker=breaker.value,
            breaker_why=breaker_why,
            facts=facts_of(replica),
        )


def _labels(replica: Replica) -> tuple[str, str]:
    return replica.info.variant, replica.info.replica_id


def _unreached(source: Unreached) -> str:
    at = f" at {source.where}" if source.where else ""
    return f"{source.who}{at}: {source.text}"
