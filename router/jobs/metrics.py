"""What jobs have to tell, for `/metrics` and `/v1/status`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.jobs.jobs import Jobs
from router.jobs.records import ENDED, BatchStatus


class JobMetrics(Collector):
    """Read at every scrape."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        runner = self._jobs.runner
        there = GaugeMetricFamily("overspill_batches", "Batches that have not ended, by status.", labels=["status"])
        for status in BatchStatus:
            if status not in ENDED:
                there.add_metric([status.value], 0 if runner is None else runner.batches[status.value])
        yield there
        yield GaugeMetricFamily(
            "overspill_batch_lines_running",
            "Requests of batches that the tier computes now.",
            value=0 if runner is None else runner.running,
        )
        yield GaugeMetricFamily(
            "overspill_batch_lines_held",
            "1 while batches wait: for online requests, for replicas, or for room on the disk.",
            value=0 if runner is None else float(bool(runner.held)),
        )
        yield CounterMetricFamily(
            "overspill_batch_lines_answered",
            "Requests of batches whose answers are on the disk.",
            value=0 if runner is None else runner.written,
        )
        yield CounterMetricFamily(
            "overspill_batch_lines_stopped",
            "Requests of batches that were stopped for online ones, and run again.",
            value=0 if runner is None else runner.stopped,
        )
        yield CounterMetricFamily(
            "overspill_batch_lines_paused",
            "Requests of batches that were held up for online ones, with all that they had, and went on later.",
            value=0 if runner is None else runner.paused,
        )
        deferring, webhook = self._jobs.deferring, self._jobs.webhook
        yield CounterMetricFamily(
            "overspill_deferred_answered",
            "Deferred requests that have ended, answered or given up.",
            value=0 if deferring is None else deferring.answered,
        )
        yield CounterMetricFamily(
            "overspill_webhook_told", "Events that the webhook has taken.", value=0 if webhook is None else webhook.told
        )
        yield GaugeMetricFamily(
            "overspill_webhook_failing",
            "1 while the webhook does not take what it is told.",
            value=0 if webhook is None else float(bool(webhook.fault)),
        )
        yield GaugeMetricFamily(
            "overspill_jobs_held_bytes", "What files and answers take on the disk.", value=self._jobs.held_bytes
        )
