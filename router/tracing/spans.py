"""From stages to spans of the OpenTelemetry SDK, made by its own tracer with the ids and times that are known."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from router.base.extras import installed
from router.values.trace import Stage, TraceContext

_KINDS = {"server": otel.SpanKind.SERVER, "client": otel.SpanKind.CLIENT, "internal": otel.SpanKind.INTERNAL}


class _GivenIds(RandomIdGenerator):
    """Ids that are known already, one use each; else random ones."""

    def __init__(self) -> None:
        self.trace_id: int | None = None
        self.span_id: int | None = None

    def generate_trace_id(self) -> int:
        given, self.trace_id = self.trace_id, None
        return super().generate_trace_id() if given is None else given

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, None
        return super().generate_span_id() if given is None else given


class SpanMaker:
    """Use it from one thread.

    Args:
        service: `service.name` of every span.
    """

    def __init__(self, service: str) -> None:
        self._ids = _GivenIds()
        resource = Resource.create({SERVICE_NAME: service, SERVICE_VERSION: installed("overspill")})
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._tracer = provider.get_tracer("overspill")

    def spans(self, trace: TraceContext, accepted_ns: int, stages: Sequence[Stage]) -> list[ReadableSpan]:
        """Return one span for each stage, ended.

        Args:
            accepted_ns: when the request was accepted, in nanoseconds since 1970.
        """
        made: list[otel.Span] = []
        for stage in stages:
            parent = self._caller(trace) if stage.parent is None else otel.set_span_in_context(made[stage.parent])
            self._ids.trace_id, self._ids.span_id = trace.trace_id, stage.span_id
            span = self._tracer.start_span(
                stage.name,
                context=parent,
                kind=_KINDS[stage.kind],
                attributes=dict(stage.attributes),
                start_time=accepted_ns + round(stage.begin_s * 1e9),
            )
            for at_s, name in stage.events:
                span.add_event(name, timestamp=accepted_ns + round(at_s * 1e9))
            if stage.error:
                span.set_status(otel.Status(otel.StatusCode.ERROR, stage.error))
            span.end(accepted_ns + round(stage.end_s * 1e9))
            made.append(span)
        return [span for span in made if isinstance(span, ReadableSpan)]

    @staticmethod
    def _caller(trace: TraceContext) -> Context:
        """The context of the caller's span, an empty one where the trace begins here."""
        empty = Context()
        if trace.parent_id is None:
            return empty
        flags = otel.TraceFlags(otel.TraceFlags.SAMPLED)
        context = otel.SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags)
        return otel.set_span_in_context(otel.NonRecordingSpan(context), empty)
