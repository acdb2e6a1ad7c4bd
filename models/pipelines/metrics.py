"""The stages of pipelines as Prometheus families, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from models.pipelines.replica import PipelineReplica
from models.pipelines.stage import SIZES, StageCounters

_LABELS = ("variant", "stage")
_COUNTERS = {
    "busy_s": ("busy_seconds", "Time that its workers computed, all together."),
    "waited_s": ("wait_seconds", "Time that its inputs waited, all together."),
    "items": ("inputs", "Inputs computed."),
    "cost": ("tokens", "Size of the inputs computed, in tokens where they have some."),
    "padded": ("padded_tokens", "The same with the padding of their batches."),
    "failed": ("failed_inputs", "Inputs that failed."),
    "isolated": ("isolated_requests", "Requests that failed alone, without the batch that they came in."),
    "late": ("late_inputs", "Inputs dropped since their deadline had passed."),
}


def stage_metrics(replicas: Iterable[PipelineReplica]) -> Iterator[Metric]:
    """Describe every stage of every pipeline that is loaded."""
    queue = GaugeMetricFamily("overspill_stage_queue_inputs", "Inputs that wait at a stage.", labels=_LABELS)
    held = GaugeMetricFamily("overspill_stage_queue_bytes", "Memory of the inputs at a stage.", labels=_LABELS)
    busy = GaugeMetricFamily("overspill_stage_busy_workers", "Workers that compute a batch now.", labels=_LABELS)
    workers = GaugeMetricFamily("overspill_stage_workers", "Workers of a stage.", labels=_LABELS)
    sizes = HistogramMetricFamily("overspill_stage_batch_inputs", "Inputs of a batch.", labels=_LABELS)
    counters = {
        field: CounterMetricFamily(f"overspill_stage_{name}", text, labels=_LABELS)
        for field, (name, text) in _COUNTERS.items()
    }
    for replica in replicas:
        for stage in replica.stages:
            labels = [replica.info.variant, stage.plan.name]
            queue.add_metric(labels, stage.waiting)
            held.add_metric(labels, stage.size_bytes)
            busy.add_metric(labels, stage.busy)
            workers.add_metric(labels, stage.plan.workers)
            sizes.add_metric(labels, _buckets(stage.counters), sum_value=stage.counters.items)
            for field, family in counters.items():
                family.add_metric(labels, float(getattr(stage.counters, field)))
    yield from (queue, held, busy, workers, sizes)
    yield from counters.values()


class StageMetrics(Collector):
    """The same as a collector of its own.

    Args:
        replicas: every pipeline that there is now.
    """

    def __init__(self, replicas: Callable[[], Iterable[PipelineReplica]]) -> None:
        self._replicas = replicas

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: the models are known only when they are served."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        return stage_metrics(self._replicas())


def _buckets(counters: StageCounters) -> list[tuple[str, float]]:
    found, total = [], 0
    for most, count in zip((*map(float, SIZES), float("inf")), counters.sizes, strict=True):
        total += count
        found.append(("+Inf" if most == float("inf") else str(most), float(total)))
    return found
