"""Tests that a collector that hangs, refuses spans or is missing only causes the loss of spans."""

from __future__ import annotations

import pytest
import trio

from trioserve.commands.serving import open_tracing
from trioserve.config import Config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER
from trioserve.metrics.registry import Metrics
from trioserve.testing.memory_server import open_memory_server
from trioserve.tracing.otel import OtelTracing

PATH = "/v1/completions"


def begin_and_end(otel: OtelTracing, count: int) -> None:
    for _ in range(count):
        otel.tracer.begin("work").end()


def test_spans_beyond_the_queue_of_a_hanging_collector_are_counted(collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.may_answer.clear()
    otel = OtelTracing(endpoint=collector.url)
    begin_and_end(otel, 4)
    assert collector.asked.wait(20)  # The collector has received four spans, and does not respond.
    begin_and_end(otel, 20)
    assert otel.counts() == (0, 0, 12)
    collector.may_answer.set()
    otel.close()
    assert otel.counts() == (12, 0, 12)
    assert len(collector.spans) == 12


def test_spans_that_a_collector_refuses_are_counted(collector):
    collector.status = 400
    otel = OtelTracing(endpoint=collector.url)
    begin_and_end(otel, 3)
    otel.close()
    assert otel.counts() == (0, 3, 0)


async def test_hanging_collector_blocks_neither_requests_nor_shutdown(collector, autojump_clock, caplog):
    collector.may_answer.clear()
    config = Config(otlp_endpoint=collector.url)
    async with open_tracing(config, {}) as tracing:
        async with open_memory_server(tracer=tracing.tracer) as server:
            for _ in range(3):
                response = await server.client().post(PATH, {"prompt": "p", "max_tokens": 2})
                assert await response.head() == 200
            await server.assert_all_free()
        left_at = trio.current_time()
    assert trio.current_time() - left_at == 5
    assert "the last spans were not sent" in caplog.text


async def test_counts_of_exported_and_lost_spans_are_metrics(collector):
    metrics = Metrics("fake")
    async with open_tracing(Config(otlp_endpoint=collector.url), {}) as tracing:
        tracing.show(metrics)
        tracing.tracer.begin("work").end()
    shown = metrics.expose().decode()
    assert 'trioserve:trace_spans_total{model_name="fake",outcome="exported"} 1.0' in shown
    assert 'trioserve:trace_spans_total{model_name="fake",outcome="dropped"} 0.0' in shown


async def test_tracing_is_off_without_an_endpoint(collector):
    for environment in (
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_TRACES_EXPORTER": "none"},
    ):
        async with open_tracing(Config(), environment) as tracing:
            assert tracing.tracer is NO_TRACER


async def test_standard_environment_variables_turn_tracing_on(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with open_tracing(Config()) as tracing:
        tracing.tracer.begin("work").end()
    assert [span.name for span in collector.spans] == ["work"]
    assert collector.resource["service.name"] == "mine"


async def test_no_trace_is_recorded_if_the_sample_share_is_zero(collector):
    async with open_tracing(Config(otlp_endpoint=collector.url, trace_sample=0.0), {}) as tracing:
        span = tracing.tracer.begin("work")
        assert not span.is_recording
        flags = span.headers()[0][1].rpartition("-")[2]
        assert int(flags, 16) & 1 == 0
        span.end()
        caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        tracing.tracer.begin("asked for", traceparent=caller).end()
    assert [span.name for span in collector.spans] == ["asked for"]


@pytest.mark.parametrize("traceparent", ["", "00-0-0-01", "x" * 10_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_invalid_trace_context_begins_a_new_trace(otel, collector, traceparent):
    otel.tracer.begin("work", traceparent=traceparent, tracestate="=,=").end()
    otel.close()
    assert collector.one("work").parent_id == ""


async def test_error_of_tracing_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trioserve.tracing.otel", None)
    with pytest.raises(StartupError, match=r"pip install .*\[otel\]"):
        async with open_tracing(Config(otlp_endpoint="http://127.0.0.1:1"), {}):
            pass
    async with open_tracing(Config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) as tracing:
        assert tracing.tracer is NO_TRACER


def test_span_of_disabled_tracing_accepts_every_call_and_exports_nothing():
    child = NO_SPAN.child("work")
    child.event("x")
    child.note({"a": 1})
    child.end("error")
    assert (child.headers(), child.trace_id, child.is_recording) == ([], None, False)
    assert NO_TRACER.begin("work") is NO_SPAN
