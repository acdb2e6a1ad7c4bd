"""Metrics of the router (Prometheus, a registry of its own)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.decisions.writer import DecisionFile
from router.dispatch.records.plain_counters import Counts, Histograms
from router.signals.canary import Canaries
from router.tracing.otlp import OtlpTraces

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
_RATIO_BUCKETS = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 2.0, 3.0, 5.0)
_BREAKER_LEVEL = {"closed": 0, "half_open": 1, "open": 2}

GaugeSource = Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Telemetry:
    """The router's metrics. Each dispatcher needs one of its own.

    Attributes:
        registry: what `/metrics` shows; other rooms register theirs here too.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._count_requests()
        self._count_attempts()
        self._begin_at_zero()

    def _count_requests(self) -> None:
        served_by = ["tier", "variant"]
        self.requests = self._counter(
            "overspill_requests",
            "Requests by how they ended, who served them (`none` if nobody) and why there.",
            ["outcome", *served_by, "reason"],
        )
        self.ttft_s = self._histogram(
            "overspill_ttft_seconds", "Accepted to first text.", served_by, buckets=_TTFT_BUCKETS_S
        )
        self.tpot_s = self._histogram(
            "overspill_tpot_seconds",
            "Mean time a token after the first.",
            served_by,
            buckets=_TPOT_BUCKETS_S,
        )
        self.e2e_s = self._histogram(
            "overspill_e2e_seconds", "Accepted to last token.", served_by, buckets=_E2E_BUCKETS_S
        )
        self.queue_wait_s = self._histogram(
            "overspill_queue_wait_seconds", "Accepted to sent to a replica.", [], buckets=_TTFT_BUCKETS_S
        ).labels()
        self.ttft_ratio = self._histogram(
            "overspill_ttft_actual_over_predicted",
            "Actual TTFT over the p50 that was predicted when the request came in.",
            served_by,
            buckets=_RATIO_BUCKETS,
        )
        self.ttft_predictions = self._counter(
            "overspill_ttft_predictions",
            "Predictions by whether the actual TTFT stayed within the predicted p90.",
            ["within_p90"],
        )
        self.promises = self._counter(
            "overspill_promises",
            "What callers asked for (`ttft`, `tpot`, `deadline`), by whether it was kept; refused or broken is not.",
            ["promise", "kept"],
        )
        self.tokens = self._counter("overspill_generated_tokens", "Tokens streamed to callers.", served_by)
        self.decisions = self._counter(
            "overspill_decisions", "Times a request was looked at, to be bound or refused.", []
        ).labels()
        self.step_downs = self._counter(
            "overspill_step_downs", "Requests sent to a smaller rung to keep an objective.", ["variant"]
        )
        self.shortened = Counter(
            "overspill_shortened_answers", "Answers that a cap or the deadline cut.", registry=self.registry
        )
        self.given_up = self._counter(
            "overspill_given_up",
            "Answers that gave their slot to others before a deadline they could not keep, by whether text had come.",
            ["began"],
        )

    def _count_attempts(self) -> None:
        self.hedges = self._counter(
            "overspill_hedges",
            "Second attempts beside one whose first token was late, by whether theirs came first (`won`, `lost`).",
            ["result"],
        )
        self.failovers = self._counter(
            "overspill_failovers",
            "Attempts that failed or were refused, by stage (`before_first_token`, `mid_stream`).",
            ["stage", "endpoint"],
        )
        self.replica_failures = self._counter(
            "overspill_replica_failures", "Attempts that ended in an error, by its code.", ["endpoint", "code"]
        )
        self.self_tests = self._counter(
            "overspill_self_tests",
            "Prompts of our own to replicas on which requests failed, by result (`passed`, `failed`, `untold`).",
            ["endpoint", "result"],
        )
        self.breaker_changes = self._counter(
            "overspill_breaker_changes", "Transitions of a breaker.", ["endpoint", "state"]
        )
        self.canary_step_backs = self._counter(
            "overspill_canary_step_backs",
            "Canaries that were found worse than the stable deployment, by the test that said so.",
            ["canary", "test"],
        )
        self.reconfigurations = Counter(
            "overspill_router_reconfigurations", "Settings applied at run time.", registry=self.registry
        )

    def _begin_at_zero(self) -> None:
        """Show every sample whose labels are known beforehand: a rate over the first event would miss it."""
        for kept in ("yes", "no"):
            for promise in ("ttft", "tpot", "deadline"):
                self.promises.labels(promise, kept)
            self.ttft_predictions.labels(kept)
            self.given_up.labels(kept)
        for result in ("won", "lost"):
            self.hedges.labels(result)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counts:
        counts = Counts(Counter(name, text, labels, registry=None))
        self.registry.register(cast("Collector", counts))
        return counts

    def _histogram(self, name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Histograms:
        histograms = Histograms(Histogram(name, text, labels, registry=None, buckets=buckets), buckets)
        self.registry.register(cast("Collector", histograms))
        return histograms

    def watch(self, name: str, text: str, labels: tuple[str, ...], source: GaugeSource) -> None:
        """Register a gauge whose values are asked for at every scrape: pairs of label values and number."""
        self.registry.register(_Watched(name, text, labels, source))

    def watch_breakers(self, source: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Register the breaker gauge over pairs of endpoint and state."""
        self.watch(
            "overspill_breaker_state",
            "Breaker of an endpoint: 0 closed, 1 half_open, 2 open.",
            ("endpoint",),
            lambda: [((endpoint,), _BREAKER_LEVEL[state]) for endpoint, state in source()],
        )

    def watch_canaries(self, canaries: Canaries) -> None:
        """Register what was seen of canaries, and the weight in force."""
        self.watch(
            "overspill_canary_weight",
            "Share of the requests that a canary gets; 0 after it stepped back.",
            ("canary",),
            lambda: [((canary.settings.name,), canary.weight) for canary in canaries],
        )
        self.watch(
            "overspill_canary_evidence",
            "What speaks against a canary, by test; it steps back at 1.",
            ("canary", "test"),
            lambda: [((c.settings.name, test), value) for c in canaries for test, value in c.evidence().items()],
        )
        self.watch(
            "overspill_canary_requests",
            "Requests that either deployment of a canary answered or failed on, since the canary began.",
            ("canary", "deployment", "result"),
            lambda: [
                ((c.settings.name, side.value, result), float(number))
                for c in canaries
                for side, counts in c.counts.items()
                for result, number in (("answered", counts.answered), ("failed", counts.failed))
            ],
        )

    def watch_decision_file(self, file: DecisionFile) -> None:
        """Register what became of the lines of the decision file."""
        self.watch(
            "overspill_decision_lines",
            "Ended requests by what became of their line in the decision file since the start.",
            ("result",),
            lambda: [(("written",), file.written), *(((name,), n) for name, n in file.lost._asdict().items())],
        )

    def watch_traces(self, traces: OtlpTraces) -> None:
        """Register what became of the spans of ended requests."""
        self.watch(
            "overspill_trace_spans",
            "Spans of ended requests since the start: `exported`, `failed`; and requests `dropped` without any.",
            ("result",),
            lambda: [((name,), float(number)) for name, number in traces.counts._asdict().items()],
        )


class _Watched(Collector):
    def __init__(self, name: str, text: str, labels: tuple[str, ...], source: GaugeSource) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._source = source

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, number in self._source():
            family.add_metric(list(values), number)
        yield family

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Name the gauge without asking for its values, which may not be there yet."""
        yield GaugeMetricFamily(self._name, self._text, labels=self._labels)
