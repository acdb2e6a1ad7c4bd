"""What the gateway itself counts; the router's own figures live in `router.dispatch.telemetry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.base import logs
from router.gateway.connection_table import ConnectionTable
from router.wire.load import LoadReport


class GatewayMetrics:
    """Counters of the HTTP surface.

    Args:
        load: asked at every scrape, for the gauges that autoscalers read.
    """

    def __init__(self, registry: CollectorRegistry, load: Callable[[], LoadReport]) -> None:
        self.responses = Counter(
            "overspill_gateway_responses",
            "HTTP replies by route and status; a stream counts when it starts.",
            ["route", "status"],
            registry=registry,
        )
        self.stream_errors = Counter(
            "overspill_gateway_stream_errors",
            "Streams that ended with an error event, by error code.",
            ["code"],
            registry=registry,
        )
        self.disconnects = Counter(
            "overspill_gateway_disconnects",
            "Requests cancelled because the client went away or stopped reading.",
            registry=registry,
        )
        self.priorities_lowered = Counter(
            "overspill_gateway_priorities_lowered",
            "Requests that claimed a higher priority than their caller may, and were given that one.",
            registry=registry,
        )
        self.credit_headers_unreadable = Counter(
            "overspill_gateway_credit_headers_unreadable",
            "Headers by which a tier asks for credits that could not be read, and were ignored.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "overspill_gateway_requests_in_flight", "Inference requests inside the gateway.", registry=registry
        )
        registry.register(_LoadGauges(load))
        registry.register(_LogLines())


class ConnectionMetrics(Collector):
    """What the table of open connections has to tell."""

    def __init__(self, table: ConnectionTable) -> None:
        self._table = table

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield GaugeMetricFamily("overspill_gateway_connections", "Open connections.", value=len(self._table))
        yield CounterMetricFamily(
            "overspill_gateway_connections_closed",
            "Idle connections that were closed to make room for others.",
            value=self._table.closed,
        )


class _LogLines(Collector):
    """Log lines that nobody will read."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        lines = CounterMetricFamily("overspill_log_lines_lost", "Log lines that were lost, by reason.", labels=["why"])
        for why, count in logs.lost().items():
            lines.add_metric([why], count)
        yield lines


class _LoadGauges(Collector):
    """Queued, running and KV use, under the names that autoscalers are configured with."""

    def __init__(self, load: Callable[[], LoadReport]) -> None:
        self._load = load

    def collect(self) -> Iterator[GaugeMetricFamily]:
        report = self._load()
        waiting = GaugeMetricFamily(
            "overspill_num_requests_waiting", "Requests waiting inside replicas.", labels=["model_name"]
        )
        running = GaugeMetricFamily(
            "overspill_num_requests_running", "Requests running on replicas.", labels=["model_name"]
        )
        for load in report.variants:
            waiting.add_metric([load.variant], load.queued)
            running.add_metric([load.variant], load.running)
        yield waiting
        yield running
        yield GaugeMetricFamily(
            "overspill_num_requests_queued", "Requests waiting in the tier's queue and inside replicas.", report.queued
        )
        if report.kv_usage is not None:
            yield GaugeMetricFamily(
                "overspill_kv_cache_usage_perc", "Used share of the KV cache; 1 is full.", value=report.kv_usage
            )

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Name the gauges without asking for the load, which may not be known while the tier is being built."""
        yield GaugeMetricFamily("overspill_num_requests_waiting", "")
        yield GaugeMetricFamily("overspill_num_requests_running", "")
        yield GaugeMetricFamily("overspill_num_requests_queued", "")
        yield GaugeMetricFamily("overspill_kv_cache_usage_perc", "")
