"""The tier's own gauges: what each engine does, and how full the KV cache is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloud_tier.engine.protocol import EngineLoad
from cloud_tier.replicas import EngineReplica
from cloud_tier.scaling.watch import ScaleWatch
from router.dispatch.records.telemetry import Telemetry


class EngineMetrics(Collector):
    """What each engine does, read at every scrape."""

    def __init__(self, replicas: Sequence[EngineReplica]) -> None:
        """Watch these replicas; the sequence may grow later."""
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield one family a figure, one sample an engine."""
        restarts = CounterMetricFamily(
            "overspill_engine_restarts", "Times the engine's processes were started again.", labels=["engine"]
        )
        ready = GaugeMetricFamily("overspill_engine_ready", "1 while the engine serves.", labels=["engine"])
        step = GaugeMetricFamily("overspill_engine_step_seconds", "Smoothed duration of a step.", labels=["engine"])
        preempted = CounterMetricFamily(
            "overspill_engine_preemptions", "Sequences preempted since the engine's last start.", labels=["engine"]
        )
        hits = CounterMetricFamily(
            "overspill_engine_prefix_hit_tokens",
            "Prompt tokens found in the KV cache since the engine's last start.",
            labels=["engine"],
        )
        failed = CounterMetricFamily(
            "overspill_engine_failed_requests",
            "Requests that failed alone, in an engine that went on, since its last start.",
            labels=["engine"],
        )
        drafted = CounterMetricFamily(
            "overspill_engine_drafted_tokens", "Tokens drafted since the engine's last start.", labels=["engine"]
        )
        accepted = CounterMetricFamily(
            "overspill_engine_accepted_tokens",
            "Drafted tokens that were right since the engine's last start.",
            labels=["engine"],
        )
        for replica in self._replicas:
            name = [replica.info.replica_id]
            load = replica.engine.load()
            restarts.add_metric(name, replica.engine.restarts)
            ready.add_metric(name, float(replica.engine.ready))
            step.add_metric(name, load.step_s)
            preempted.add_metric(name, load.preemptions)
            hits.add_metric(name, load.prefix_hit_tokens)
            failed.add_metric(name, load.failed)
            drafted.add_metric(name, load.drafted_tokens)
            accepted.add_metric(name, load.accepted_tokens)
        yield from (restarts, ready, step, preempted, hits, failed, drafted, accepted)


def kv_usage(loads: Sequence[EngineLoad]) -> float | None:
    """Return the used share of all KV blocks in [0, 1]; None while no engine runs."""
    total = sum(load.kv_blocks_total for load in loads)
    return 1 - sum(load.kv_blocks_free for load in loads) / total if total else None


def watch_scaling(scale: ScaleWatch, telemetry: Telemetry) -> None:
    """Register what autoscalers read: how many replicas there should be, and what the load needs."""
    telemetry.watch(
        "overspill_desired_replicas",
        "Replicas that there should be, by model; `tier`: of this whole tier.",
        ("model",),
        scale.desired,
    )
    telemetry.watch(
        "overspill_needed_replicas",
        "What the load needs, in replicas and parts of one; the sum over all tiers behind one address is the need.",
        ("model",),
        scale.loads,
    )
