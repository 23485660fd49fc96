"""Tests the export of the front end's counters as metrics."""

from __future__ import annotations

import re

import pytest
import trio
from trio.testing import lockstep_stream_pair

from trioserve.http.counters import ConnectionRefusal, StreamRefusal, show_counters
from trioserve.metrics.registry import Metrics


def value(metrics: Metrics, series: str) -> float:
    name, _, label = series.partition("{")
    label = f",{label.rstrip('}')}" if label else ""
    found = re.search(rf'^trioserve:{name}{{model_name="m"{re.escape(label)}}} (\S+)$', metrics.expose().decode(), re.M)
    assert found, metrics.expose().decode()
    return float(found[1])


async def handler(exchange):
    await exchange.body()
    await exchange.start(200, [])
    if exchange.path == "/wait":
        await trio.sleep_forever()
    while True:
        await exchange.send(bytes(1000))


@pytest.mark.slow
async def test_each_scrape_exports_the_counters(autojump_clock, front):
    metrics = Metrics("m")
    the_front = front(handler, stall_seconds_max=30, stream_buffer_bytes_max=5000, streams_max=1)
    show_counters(metrics, the_front.server.counters)
    client, leaver = await the_front.h2(INITIAL_WINDOW_SIZE=100), the_front.h11()
    stalled = await client.request(body=b"12345678")
    refused = await client.request()
    assert (await client.response(refused)).reset_code is not None
    await the_front.settle()
    assert value(metrics, "connections_open") == 2
    assert value(metrics, "clients_slow") == 1
    assert 4000 < value(metrics, "answer_bytes_held") <= 5000
    assert value(metrics, "request_body_bytes_held") == 8
    await leaver.request("/wait", body=b"123")
    await the_front.settle()
    await leaver.stream.aclose()
    await client.response(stalled)
    await client.stream.aclose()
    await the_front.settle()
    for _ in range(2):  # A second scrape must not count events again.
        assert value(metrics, "connections_total") == 2
        assert value(metrics, "connections_open") == 0
        assert value(metrics, "clients_slow") == value(metrics, "answer_bytes_held") == 0
        assert value(metrics, "request_body_bytes_held") == 0
        assert value(metrics, "request_body_bytes_total") == 11
        assert value(metrics, "clients_left_total") == 1
        assert value(metrics, "clients_stalled_total") == 1
        assert value(metrics, 'streams_refused_total{reason="streams_max"}') == 1


async def test_counter_of_each_reason_is_exported_as_zero_at_first(autojump_clock, front):
    metrics = Metrics("m")
    show_counters(metrics, front(handler).server.counters)
    for reason in ConnectionRefusal:
        assert value(metrics, f'connections_refused_total{{reason="{reason}"}}') == 0
    for reason in StreamRefusal:
        assert value(metrics, f'streams_refused_total{{reason="{reason}"}}') == 0


async def test_bytes_of_an_http_1_1_client_that_does_not_read_are_counted(autojump_clock, front):
    metrics = Metrics("m")
    the_front = front(handler)
    show_counters(metrics, the_front.server.counters)
    stream = the_front.connect(lockstep_stream_pair)
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    await the_front.settle()
    assert value(metrics, "clients_slow") == 1
    assert value(metrics, "answer_bytes_held") > 0
    await stream.aclose()
