"""What the gateway itself counts; the router's own figures live in `router.dispatch.records.telemetry`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.base import logs
from router.base.build import build_of
from router.dispatch.records.plain_counters import Counts
from router.gateway.connection_table import ConnectionTable


class GatewayMetrics:
    """Counters of the HTTP surface."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.responses = Counts(
            Counter(
                "overspill_gateway_responses",
                "HTTP replies by route and status; a stream counts when it starts.",
                ["route", "status"],
                registry=None,
            )
        )
        registry.register(self.responses)
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
        build = Gauge(
            "overspill_build_info",
            "1, with the version, and whether the router is interpreted, compiled, or compiled from other sources.",
            ["version", "router"],
            registry=registry,
        )
        build.labels(metadata.version("overspill"), build_of().name).set(1)
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
