"""Tests the metrics of HTTP requests by route, method and class of status, and of their durations."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from trioserve.http.handler_call import CrossOrigin

CHAT = "/v1/chat/completions"


def shown(api: Any, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric. The keys are the values of the labels, in the order of the labels' names."""
    return {
        tuple(value for _label, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(api.engine.metrics.expose().decode())
        for sample in family.samples
        if sample.name == name
    }


async def test_each_request_is_counted_by_route_method_and_class_of_status(api: Any) -> None:
    await api.chat()
    await api.chat()
    await api.chat(n=0)
    await api.context("GET", "/v1/models/letters")
    await api.context("GET", "/v1/models/nobody")
    await api.context("GET", "/v1/../etc/passwd")
    await api.context("BREW", CHAT)
    await api.context("HEAD", "/v1/models")
    assert shown(api, "http_requests_total") == {
        (CHAT, "POST", "2xx"): 2,
        (CHAT, "POST", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
        (CHAT, "other", "4xx"): 1,
        ("/v1/models", "HEAD", "2xx"): 1,
    }
    assert shown(api, "http_request_duration_seconds_count") == {
        (CHAT, "POST"): 3,
        ("/v1/models/{model}", "GET"): 2,
        ("none", "GET"): 1,
        (CHAT, "other"): 1,
        ("/v1/models", "HEAD"): 1,
    }
    assert shown(api, "http_request_duration_highr_seconds_count") == {(): 8}


async def test_polled_routes_are_only_in_the_servers_own_metrics(api: Any) -> None:
    for path in ("/health", "/ready", "/load", "/version", "/metrics"):
        await api.context("GET", path)
    assert sum(shown(api, "trioserve:http_requests_total").values()) == 5
    assert shown(api, "http_requests_total") == {}
    assert shown(api, "http_request_duration_highr_seconds_count") == {(): 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_counted_once_with_the_seconds_until_then(api, stream, autojump_clock) -> None:
    held = trio.Event()
    api.engine.script = lambda prompt, sampling: [next(iter(api.say("Hel", "lo")(prompt, sampling))), held]
    with trio.move_on_after(7.5):
        await api.app(api.exchange("POST", "/v1/completions", {"prompt": "ab", "stream": stream}))
    status = "2xx" if stream else "left"
    assert shown(api, "http_requests_total") == {("/v1/completions", "POST", status): 1}
    assert shown(api, "http_request_duration_seconds_sum") == {("/v1/completions", "POST"): 7.5}


async def test_preflight_request_is_counted_without_a_duration(api: Any) -> None:
    app = api.app
    handler = CrossOrigin(app, ["https://chat.example.org"], on_preflight=app.note_preflight)
    headers = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
    await handler(api.exchange("OPTIONS", CHAT, headers=headers))
    assert shown(api, "http_requests_total") == {(CHAT, "OPTIONS", "2xx"): 1}
    assert shown(api, "http_request_duration_seconds_count") == {}
