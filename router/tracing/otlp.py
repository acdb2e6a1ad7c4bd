"""Exports the stages of ended requests as OpenTelemetry spans, by a thread of its own: no collector holds a request up.

The event loop only appends to a list. Every quarter of a second the thread makes spans of what has gathered, and sends
them in one go. A collector that is slow or away loses spans, never requests; what was lost is counted, and said once.
OpenTelemetry is an optional extra, and imported only where `[telemetry]` names a collector.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, final

import structlog

from router.base.errors import ConfigError
from router.base.extras import install, installed
from router.tracing.settings import TelemetrySettings
from router.values.trace import Headers, Stage, TraceContext, parent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = structlog.get_logger("traces")

QUEUE_REQUESTS = 4_096
_MOST_AT_ONCE = 128
_GATHER_S = 0.25
_NAP_S = 0.0005
_LAST_SPANS_S = 2.0
_PATH = "/v1/traces"


class SpanCounts(NamedTuple):
    """What became of the traces.

    Attributes:
        exported: spans that the collector took.
        failed: spans that it did not take, or that could not be made.
        dropped: requests of which no span was made: the collector was too slow, and 4,096 waited.
    """

    exported: int
    failed: int
    dropped: int


class _Ended(NamedTuple):
    trace: TraceContext
    accepted_ns: int
    tell: Callable[[], Sequence[Stage]]


@final
class OtlpTraces:
    """`router.tracing.sink.TraceSink` over an exporter of OpenTelemetry. Use as `async with`, around the dispatcher.

    Args:
        service: what this tier is called in traces: `overspill-edge`, `overspill-cloud`.
        exporter: takes the spans; blocks only the thread.
        wall_ns: nanoseconds since 1970.
    """

    def __init__(
        self,
        service: str,
        sample_ratio: float,
        exporter: SpanExporter,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._sample_below = round(sample_ratio * 2**64)
        self._wall_ns = wall_ns
        self._exporter = exporter
        self._random = random.Random()  # noqa: S311 - ids tell traces apart and hide nothing
        self._ended: deque[_Ended] = deque()
        self._closing = threading.Event()
        self._service = service
        self._failing = False
        self._full = False
        self._exported = self._failed = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    async def __aenter__(self) -> OtlpTraces:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Send what is left, for a moment and no longer."""
        self._closing.set()
        self._thread.join(_LAST_SPANS_S)
        if self._thread.is_alive():  # the collector does not answer: the process ends without it
            log.warning("traces not exported to the end", waiting=len(self._ended))
        self._exporter.shutdown()

    @property
    def counts(self) -> SpanCounts:
        """What became of the traces so far."""
        return SpanCounts(self._exported, self._failed, self._dropped)

    def begin(self, headers: Headers) -> TraceContext:
        """Return a request's place in its caller's trace, or in a new one.

        New traces are sampled by the low 64 bits of their id, as OpenTelemetry's `TraceIdRatioBased` does.
        """
        span_id = self._random.getrandbits(64) or 1
        parent = parent_of(headers)
        if parent is not None:
            trace_id, parent_id, sampled = parent
            return TraceContext(trace_id, span_id, parent_id, sampled)
        trace_id = self._random.getrandbits(128) or 1
        return TraceContext(trace_id, span_id, None, trace_id % 2**64 < self._sample_below)

    def ended(self, trace: TraceContext, since_s: float, tell: Callable[[], Sequence[Stage]]) -> None:
        """See `router.tracing.sink.TraceSink`."""
        if not trace.sampled:
            return
        if len(self._ended) >= QUEUE_REQUESTS:
            self._dropped += 1
            if not self._full:
                self._full = True
                log.warning("traces are dropped: the collector is too slow")
            return
        self._ended.append(_Ended(trace, self._wall_ns() - round(since_s * 1e9), tell))

    def _run(self) -> None:
        from router.tracing.spans import SpanMaker  # noqa: PLC0415 - imports OpenTelemetry, which takes a while

        maker = SpanMaker(self._service)
        closing = False
        while not closing:
            closing = self._closing.wait(_GATHER_S)
            while self._ended:
                spans: list[Any] = []
                while self._ended and len(spans) < _MOST_AT_ONCE:
                    ended = self._ended.popleft()
                    try:
                        spans += maker.spans(ended.trace, ended.accepted_ns, ended.tell())
                    except Exception:  # a bug of one record must not end the thread
                        self._lost(1)
                        log.exception("a trace could not be made")
                    if not closing:
                        time.sleep(_NAP_S)  # the event loop goes first
                self._export(spans)

    def _export(self, spans: list[Any]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415 - as above

        if not spans:
            return
        try:
            taken = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # whatever an exporter raises, the thread goes on
            log.exception("the exporter of traces crashed")
            taken = False
        if not taken:
            self._lost(len(spans))
            return
        self._exported += len(spans)
        if self._failing or (self._full and not self._ended):
            self._failing = self._full = False
            log.info("traces are exported again", **self.counts._asdict())

    def _lost(self, spans: int) -> None:
        self._failed += spans
        if not self._failing:
            self._failing = True
            log.warning("traces cannot be exported")


def describe(settings: TelemetrySettings) -> str:
    """Say where traces would go; opens nothing.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    if not settings.otlp_endpoint:
        return "not made"
    if not (installed("opentelemetry-sdk") and installed("opentelemetry-exporter-otlp-proto-http")):
        raise ConfigError(
            f"telemetry.otlp_endpoint needs the extra `otel`: run: {install('otel')}", param="telemetry.otlp_endpoint"
        )
    return f"{100 * settings.sample_ratio:g} % of those that begin here to {settings.otlp_endpoint}"


def open_traces(settings: TelemetrySettings, service: str) -> OtlpTraces | None:
    """Return what exports traces to the configured collector, None where none is.

    Raises:
        ConfigError: the extra `otel` is not installed.
    """
    describe(settings)
    if not settings.otlp_endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - see above

    base = settings.otlp_endpoint.rstrip("/").removesuffix(_PATH)
    return OtlpTraces(service, settings.sample_ratio, OTLPSpanExporter(endpoint=base + _PATH))
