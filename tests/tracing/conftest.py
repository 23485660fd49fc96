"""Provides a collector in the process of the test: an HTTP server that accepts OTLP and decodes the protobufs."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

collector_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
from trioserve.tracing.otel import OtelTracing  # noqa: E402  # the extra may be missing


class Span:
    def __init__(self, said: Any) -> None:
        self.name = said.name
        self.kind = said.kind
        self.id = said.span_id.hex()
        self.trace_id = said.trace_id.hex()
        self.parent_id = said.parent_span_id.hex()
        self.state = said.trace_state
        self.begun_at, self.ended_at = said.start_time_unix_nano, said.end_time_unix_nano
        self.events = [event.name for event in said.events]
        self.attributes = {pair.key: _value(pair.value) for pair in said.attributes}
        self.is_error = said.status.code == 2
        self.links = [link.trace_id.hex() for link in said.links]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class Collector:
    """A collector that records the spans that it receives.

    Attributes:
        may_answer: event. While it is not set, the collector accepts requests but sends no responses.
        status: HTTP status of the collector's responses.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.resource: dict[str, Any] = {}
        self.paths: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.asked.set()
                collector.may_answer.wait(60)
                if collector.status == 200:
                    collector.take(self.path, body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.raw += body
        request = collector_service.ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            self.resource = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Span(said) for said in scope.spans]

    def close(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    # --- received spans ---

    def one(self, name: str, *, parent: Span | None = None) -> Span:
        found = [span for span in self.spans if span.name == name and parent in (None, self.parent_of(span))]
        assert len(found) == 1, (name, self.tree())
        return found[0]

    def parent_of(self, span: Span) -> Span | None:
        return next((other for other in self.spans if other.id == span.parent_id), None)

    def children(self, span: Span) -> list[str]:
        return [other.name for other in sorted(self.spans, key=lambda s: s.begun_at) if other.parent_id == span.id]

    def tree(self) -> list[tuple[str, str | None]]:
        return [(s.name, None if (parent := self.parent_of(s)) is None else parent.name) for s in self.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def otel(collector: Collector) -> Iterator[OtelTracing]:
    made = OtelTracing(endpoint=collector.url)
    yield made
    made.close()
