"""Spans as the SDK's own exporters get them: through both tiers' real gateways, and when the collector misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NoReturn

import httpx
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cloud_tier.config import CloudConfig
from edge_agent.config import EdgeConfig
from router.base.config import decode, overlay
from router.base.errors import ConfigError
from router.dispatch.records.telemetry import Telemetry
from router.tracing import otlp
from router.tracing.otlp import OtlpTraces, open_traces
from router.tracing.settings import TelemetrySettings
from router.values.trace import Stage, TraceContext, parent_of
from router.wire.headers import passed_on
from tests.support.gateway_fakes import replica_info
from tests.support.paths import REPOSITORY
from tests.support.tiers import Reciter, Tier, linked
from tests.support.waiting import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
IN_THE_CLOUD = {"x-overspill-locality": "cloud-only"}


class Traced:
    """Both tiers, each with an exporter of its own that keeps what it gets."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.exporters = {name: InMemorySpanExporter() for name in ("edge", "cloud")}
        self.traces = {
            name: OtlpTraces(f"overspill-{name}", sample_ratio, exporter) for name, exporter in self.exporters.items()
        }
        self.best = Reciter(replica_info("tiny-fp32", 0, tier="cloud"))
        self.small = Reciter(replica_info("tiny-int8", 1, tier="edge", quality=0.5))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        cloud = Tier("cloud", [self.best], traces=self.traces["cloud"])
        edge = Tier("edge", [self.small], traces=self.traces["edge"])
        client = httpx.AsyncClient(base_url=edge.url, timeout=20)
        sinks = self.traces["cloud"], self.traces["edge"]
        async with sinks[0], sinks[1], cloud, edge, linked(edge, cloud, [self.small]), client:
            yield client

    async def spans(self, tier: str, number: int) -> dict[str, ReadableSpan]:
        """Return the spans of one request by name, once all have come."""
        exporter = self.exporters[tier]
        await until(lambda: len(exporter.get_finished_spans()) >= number)
        found = exporter.get_finished_spans()
        assert len(found) == number, [span.name for span in found]
        assert {span.resource.attributes["service.name"] for span in found} == {f"overspill-{tier}"}
        return {span.name: span for span in found}


def _crash() -> NoReturn:
    raise ZeroDivisionError("a bug")


async def test_edge_and_cloud_are_one_trace_below_the_callers_span() -> None:
    traced = Traced()
    async with traced.running() as client:
        reply = await client.post(
            "/v1/chat/completions", json=CHAT, headers={**CALLER, **IN_THE_CLOUD, "x-request-id": "r1"}
        )
        assert reply.status_code == 200
        edge, cloud = await traced.spans("edge", 6), await traced.spans("cloud", 5)
    assert set(edge) == {"request", "queue", "bind", "link", "prefill", "decode"}
    assert set(cloud) == {"request", "queue", "bind", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in (*edge.values(), *cloud.values())} == {TRACE}
    assert f"{edge['request'].parent.span_id:016x}" == SPAN
    assert edge["link"].parent.span_id == edge["request"].context.span_id
    assert cloud["request"].parent.span_id == edge["link"].context.span_id
    assert edge["prefill"].parent.span_id == edge["decode"].parent.span_id == edge["link"].context.span_id
    assert (edge["request"].kind, edge["link"].kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert {
        edge["request"].attributes["overspill.request_id"],
        cloud["request"].attributes["overspill.request_id"],
    } == {"r1"}
    assert edge["link"].start_time <= cloud["request"].start_time <= cloud["request"].end_time
    for spans in (edge, cloud):
        for span in spans.values():
            assert spans["request"].start_time <= span.start_time <= span.end_time
    # What the cloud's replica is sent goes on from there, and the caller's state travels with it.
    sent = dict(traced.best.requests[0].headers)
    assert sent["traceparent"] == f"00-{TRACE}-{cloud['request'].context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1"


async def test_without_a_callers_trace_one_begins_here() -> None:
    traced = Traced()
    async with traced.running() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=IN_THE_CLOUD)).status_code == 200
        edge, cloud = await traced.spans("edge", 6), await traced.spans("cloud", 5)
    assert edge["request"].parent is None
    assert edge["request"].context.trace_id == cloud["request"].context.trace_id
    assert "tracestate" not in dict(traced.best.requests[0].headers)


@pytest.mark.parametrize(("flags", "ratio"), [("00", 1.0), (None, 0.0)])
async def test_what_is_not_sampled_is_not_exported_and_the_ids_travel_on(flags: str | None, ratio: float) -> None:
    traced = Traced(ratio)
    caller = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"} if flags else {}
    async with traced.running() as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={**caller, **IN_THE_CLOUD})
    sent = dict(traced.best.requests[0].headers)["traceparent"]
    assert sent.endswith("-00")
    assert (TRACE in sent) == bool(flags)
    for name, exporter in traced.exporters.items():
        assert exporter.get_finished_spans() == (), name
        assert traced.traces[name].counts == (0, 0, 0)


async def test_a_sampled_caller_is_followed_whatever_the_ratio_here() -> None:
    traced = Traced(0.0)
    async with traced.running() as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={**CALLER, "x-overspill-locality": "local-only"})
        edge = await traced.spans("edge", 5)
    assert edge["request"].attributes["overspill.locality"] == "local-only"


async def test_a_refusal_is_an_error_and_a_wrong_request_is_not() -> None:
    traced = Traced()
    traced.small.available = False
    settings_wait = {"x-overspill-locality": "local-only", "x-overspill-deadline-ms": "80"}
    cloud = Tier("cloud", [traced.small], traces=traced.traces["cloud"])
    async with traced.traces["cloud"], cloud, httpx.AsyncClient(base_url=cloud.url, timeout=20) as client:
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=settings_wait)
        assert refused.status_code == 503
        spans = await traced.spans("cloud", 2)
    assert spans["request"].status.status_code is StatusCode.ERROR
    assert spans["queue"].status.status_code is StatusCode.UNSET


def some(_: int = 0) -> list[Stage]:
    return [Stage("request", 0.0, 1.0, "server", None, 5), Stage("queue", 0.0, 0.5)]


class Refusing(SpanExporter):
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.takes = False
        self.crashes = False
        self.batches: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(len(spans))
        if self.crashes:
            raise OSError("a bug")
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE


async def test_a_collector_that_is_away_costs_spans_and_is_counted() -> None:
    exporter = Refusing()
    traces = OtlpTraces("overspill-edge", 1.0, exporter)
    telemetry = Telemetry()
    telemetry.watch_traces(traces)
    async with traces:
        traces.ended(traces.begin(()), 1.0, some)
        await until(lambda: traces.counts.failed == 2)
        exporter.crashes = True
        traces.ended(traces.begin(()), 1.0, some)
        await until(lambda: traces.counts.failed == 4)
        exporter.crashes, exporter.takes = False, True
        traces.ended(traces.begin(()), 1.0, _crash)
        traces.ended(traces.begin(()), 1.0, some)
        await until(lambda: traces.counts.exported == 2)
        assert traces.counts == (2, 5, 0)
    assert telemetry.registry.get_sample_value("overspill_trace_spans", {"result": "failed"}) == 5


async def test_a_collector_that_hangs_costs_requests_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "QUEUE_REQUESTS", 3)
    monkeypatch.setattr(otlp, "_LAST_SPANS_S", 0.05)
    hangs, hanging = threading.Event(), threading.Event()

    class Hanging(Refusing):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            hanging.set()
            hangs.wait(20)
            return super().export(spans)

    traces = OtlpTraces("overspill-edge", 1.0, Hanging())
    async with traces:
        traces.ended(traces.begin(()), 1.0, some)
        await until(hanging.is_set)
        for _ in range(5):
            traces.ended(traces.begin(()), 1.0, some)
        assert traces.counts.dropped == 2
    hangs.set()  # leaving did not wait for it


async def test_what_was_gathered_is_sent_at_the_end() -> None:
    exporter = InMemorySpanExporter()
    async with OtlpTraces("overspill-edge", 1.0, exporter) as traces:
        for _ in range(200):
            traces.ended(traces.begin(()), 1.0, some)
    assert len(exporter.get_finished_spans()) == 400


async def test_spans_lie_where_the_clock_of_the_wall_was() -> None:
    exporter = InMemorySpanExporter()
    async with OtlpTraces("overspill-edge", 1.0, exporter, wall_ns=lambda: 5_000_000_000) as traces:
        traces.ended(TraceContext(3, 5, None, sampled=True), 1.0, some)
    request, queue = exporter.get_finished_spans()
    assert (request.start_time, request.end_time) == (4_000_000_000, 5_000_000_000)
    assert (queue.start_time, queue.end_time) == (4_000_000_000, 4_500_000_000)
    assert (request.context.trace_id, request.context.span_id) == (3, 5)


@pytest.mark.parametrize(
    "value",
    [f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", ""],
)
def test_a_traceparent_that_names_nothing_is_none(value: str) -> None:
    assert parent_of(passed_on({"traceparent": value})) is None
    later = passed_on({"traceparent": f"01-{TRACE}-{SPAN}-03-more"})
    assert parent_of(later) == (int(TRACE, 16), int(SPAN, 16), True)


async def test_spans_reach_a_collector_over_http() -> None:
    """What OTLP says on the wire: the path, protobuf, and a key of the environment."""
    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traces = open_traces(
            TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/"), "overspill-edge"
        )
        assert traces is not None
        async with traces:
            traces.ended(traces.begin(()), 1.0, some)
            await until(lambda: got)
        await asyncio.to_thread(server.shutdown)
    path, told = got[0]
    spans = [span for resource in told.resource_spans for scope in resource.scope_spans for span in scope.spans]
    assert path == "/v1/traces"
    assert {span.name for span in spans} == {"request", "queue"}


def test_off_by_default_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_traces(TelemetrySettings(), "overspill-edge") is None
    assert otlp.describe(TelemetrySettings()) == "not made"
    a_tenth = TelemetrySettings(otlp_endpoint="http://127.0.0.1:4318", sample_ratio=0.1)
    assert otlp.describe(a_tenth) == "10 % of those that begin here to http://127.0.0.1:4318"
    monkeypatch.setattr(otlp, "installed", lambda _: "")
    with pytest.raises(ConfigError, match=r"extra `otel`: run: pip install"):
        open_traces(TelemetrySettings(otlp_endpoint="http://127.0.0.1:4318"), "overspill-edge")


@pytest.mark.parametrize("shape", [EdgeConfig, CloudConfig])
@pytest.mark.parametrize(
    "telemetry",
    [{"otlp_endpoint": "collector:4318"}, {"otlp_endpoint": "http://me:secret@c"}, {"sample_ratio": 1.5}, {"x": 1}],
)
def test_a_wrong_table_is_refused(shape: type[msgspec.Struct], telemetry: dict) -> None:
    tree = overlay({"telemetry": telemetry}, "NONE", {}, None)
    with pytest.raises(ConfigError, match="telemetry") as refused:
        decode(tree, shape, source="a test")
    assert "secret" not in refused.value.message


@pytest.mark.process
def test_nothing_of_opentelemetry_is_loaded_while_it_is_off() -> None:
    code = (
        "import sys; from edge_agent.config import EdgeConfig; from router.dispatch.dispatcher import Dispatcher;"
        "from router.values.settings import RouterSettings; from router.tracing.otlp import open_traces;"
        "open_traces(EdgeConfig().telemetry, 'x'); Dispatcher([], RouterSettings());"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
