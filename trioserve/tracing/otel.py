"""OpenTelemetry spans. A background thread exports them from a bounded queue.

Ending a span only puts the span into the queue. If a collector is slow, hangs or refuses spans, spans are lost and
counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import Span as OtelApiSpan
from opentelemetry.trace import Tracer as OtelApiTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trioserve.contracts import tracing
from trioserve.contracts.extras import VERSION
from trioserve.contracts.tracing import NO_SPAN, Attributes, Span, Tracer

__all__ = ["OtelTracing", "SpanCounts"]

# OpenTelemetry has the same default. The queue holds the spans of some busy seconds, and takes about 4 MB.
QUEUE_SPANS_MAX = 2048
TRACES_PATH = "/v1/traces"
KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
PROPAGATOR = TraceContextTextMapPropagator()
NOTHING = Context()


class SpanCounts(NamedTuple):
    """Numbers of spans so far.

    Attributes:
        exported: spans that the collector accepted.
        failed: spans that the collector did not accept.
        dropped: spans that were lost because the queue was full.
    """

    exported: int
    failed: int
    dropped: int


class OtelTracing:
    """A tracer that exports to an OpenTelemetry collector. The creator must call `close`.

    The standard environment variables configure all other settings.

    Args:
        endpoint: the collector's URL, with or without `/v1/traces`. None: from OTEL_EXPORTER_OTLP_ENDPOINT or
            OTEL_EXPORTER_OTLP_TRACES_ENDPOINT.
        sample: share of the traces that begin here and are recorded, 0 to 1. A trace that began elsewhere is recorded
            if its creator records it. None: from OTEL_TRACES_SAMPLER.
    """

    def __init__(self, *, endpoint: str | None = None, sample: float | None = None) -> None:
        self._exporter = _CountedExporter(
            OTLPSpanExporter(endpoint=None if endpoint is None else _traces_url(endpoint))
        )
        self._processor = _BoundedProcessor(self._exporter)
        self._provider = TracerProvider(
            sampler=None if sample is None else ParentBased(TraceIdRatioBased(sample)),
            resource=_resource(),
            shutdown_on_exit=False,  # The library's exit hook would wait for a collector that hangs.
        )
        self._provider.add_span_processor(self._processor)
        self.tracer: Tracer = _OtelTracer(self._provider.get_tracer("trioserve", VERSION))

    def counts(self) -> SpanCounts:
        return SpanCounts(self._exporter.exported, self._exporter.failed, self._processor.dropped)

    def close(self) -> None:
        """Send the remaining spans. Waits for the collector, so call this in a thread that no other task waits for."""
        self._provider.shutdown()


class _OtelTracer(Tracer):
    def __init__(self, tracer: OtelApiTracer) -> None:
        self._tracer = tracer

    def begin(
        self,
        name: str,
        *,
        kind: tracing.SpanKind = "internal",
        parent: Span | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        links: list[Link] = []
        context = NOTHING
        if traceparent is not None:
            carrier = {"traceparent": traceparent, **({} if tracestate is None else {"tracestate": tracestate})}
            context = PROPAGATOR.extract(carrier, NOTHING)
        if isinstance(parent, _OtelSpan):
            said = get_current_span(context).get_span_context()
            if said.is_valid and said.trace_id != parent.span.get_span_context().trace_id:
                links.append(Link(said))
            context = set_span_in_context(parent.span, NOTHING)
        span = self._tracer.start_span(name, context, KINDS[kind], attributes, links)
        return _OtelSpan(span, self._tracer) if span.get_span_context().is_valid else NO_SPAN


class _OtelSpan(Span):
    __slots__ = ("_tracer", "span")

    def __init__(self, span: OtelApiSpan, tracer: OtelApiTracer) -> None:
        self.span = span
        self._tracer = tracer

    @property
    def trace_id(self) -> str | None:
        return f"{self.span.get_span_context().trace_id:032x}"

    @property
    def is_recording(self) -> bool:
        return self.span.is_recording()

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self.span.is_recording():
            self.span.add_event(name, attributes)

    def note(self, attributes: Attributes) -> None:
        if self.span.is_recording():
            self.span.set_attributes(attributes)

    def child(self, name: str, *, kind: tracing.SpanKind = "internal", attributes: Attributes | None = None) -> Span:
        context = set_span_in_context(self.span, NOTHING)
        return _OtelSpan(self._tracer.start_span(name, context, KINDS[kind], attributes), self._tracer)

    def headers(self) -> list[tuple[str, str]]:
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(self.span, NOTHING))
        return list(carrier.items())

    def end(self, error: str | None = None) -> None:
        if not self.span.is_recording():
            return
        if error is not None:
            self.span.set_attribute("error.type", error)
            self.span.set_status(Status(StatusCode.ERROR))
        self.span.end()


class _CountedExporter(SpanExporter):
    """Counts exported spans. Used only in the exporting thread.

    Args:
        exporter: does the export.

    Attributes:
        received: spans that have left the queue.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.received = self.exported = self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.received += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _BoundedProcessor(SpanProcessor):
    """OpenTelemetry's batch processor, with a count of the spans that do not fit into the queue. The library drops
    these spans silently.
    """

    def __init__(self, exporter: _CountedExporter) -> None:
        self._exporter = exporter
        self._spans_max = _whole_number(os.environ, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS_MAX)
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=self._spans_max,
            max_export_batch_size=min(
                self._spans_max, _whole_number(os.environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
            ),
        )
        self._taken = 0
        self.dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._taken - self._exporter.received >= self._spans_max:
            self.dropped += 1
            return
        self._taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)


def _traces_url(endpoint: str) -> str:
    url = endpoint.rstrip("/")
    return url if url.endswith(TRACES_PATH) else url + TRACES_PATH


def _resource() -> Resource:
    """Return our resource attributes, except those that environment variables set."""
    said = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if "OTEL_SERVICE_NAME" in os.environ or "service.name=" in said else {"service.name": "trioserve"}
    return Resource.create({**name, "service.version": VERSION})


def _whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else default
