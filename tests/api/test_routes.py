"""Tests the behaviour of all paths: which paths exist, request ids, API keys, errors, and counts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from trioserve.api.routes import OPERATIONS
from trioserve.contracts.errors import StartupError
from trioserve.contracts.output import Delta

CHAT = "/v1/chat/completions"
OPEN = ("/health", "/ready", "/load", "/version", "/metrics", "/openapi.json", "/", "/api/version")


def counted(api: Any) -> dict[tuple[str, str], float]:
    api.engine.metrics.expose()  # The counts are written to the metrics at a scrape.
    [family] = [f for f in api.engine.metrics.registry.collect() if f.name == "http_requests"]
    return {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


# --- paths and methods ---


@pytest.mark.parametrize("path", ["//", "/v1", "/v1/models/", "/v1/chat/completions/", "/V1/models", "*", "/health/x"])
async def test_an_unknown_path_is_404_in_the_format_of_the_api(api: Any, path: str) -> None:
    exchange = await api.context("GET", path)
    assert exchange.status == 404
    assert exchange.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "path, nearest",
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/V1/Models/", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
async def test_the_error_for_an_unknown_path_suggests_a_similar_path(api: Any, path: str, nearest: str) -> None:
    message = (await api.context("GET", path)).json()["error"]["message"]
    assert message == f"there is nothing at {path}: did you mean {nearest}?"


@pytest.mark.parametrize("path", ["/favicon.ico", "/" + "v1/models" * 1000])
async def test_long_unknown_path_gets_no_suggestion(api: Any, path: str) -> None:
    message = (await api.context("GET", path)).json()["error"]["message"]
    assert "did you mean" not in message


@pytest.mark.parametrize(
    "method, path, allow",
    [
        ("GET", CHAT, "POST"),
        ("HEAD", CHAT, "POST"),
        ("DELETE", "/v1/models/letters", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("BREW", "/tokenize", "POST"),
    ],
)
async def test_a_wrong_method_is_405_with_the_allowed_methods(api: Any, method: str, path: str, allow: str) -> None:
    exchange = await api.context(method, path)
    assert exchange.status == 405
    assert exchange.response_headers["allow"] == allow
    if method != "HEAD":
        assert exchange.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", [*OPEN, "/v1/models", "/v1/models/letters"])
async def test_head_gets_the_response_of_get_without_a_body(api: Any, path: str) -> None:
    head, get = await api.context("HEAD", path), await api.context("GET", path)
    assert head.status == get.status == 200
    assert head.data == b""
    assert get.data
    assert head.response_headers["content-type"] == get.response_headers["content-type"]


# --- request ids ---


@pytest.mark.parametrize("request_id", ["a", "x" * 128, "with blank", "~!@#"])
async def test_the_request_id_of_the_client_is_used_everywhere(api: Any, request_id: str) -> None:
    exchange = await api.context(
        "POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": True}, x_request_id=request_id
    )
    assert exchange.response_headers["x-request-id"] == request_id
    assert exchange.events()[0]["id"] == "chatcmpl-" + request_id
    assert api.engine.streams[0].id == request_id


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\tb", "é", "a\x7f"])
async def test_a_request_id_that_no_header_can_carry_is_refused(api: Any, request_id: str) -> None:
    exchange = await api.context("GET", "/v1/models", x_request_id=request_id)
    assert exchange.status == 400
    assert exchange.json()["error"]["param"] == "X-Request-Id"
    assert exchange.response_headers["x-request-id"] != request_id


async def test_every_request_without_an_id_gets_a_new_id(api: Any) -> None:
    ids = {
        (await api.context("GET", path)).response_headers["x-request-id"] for path in ("/health", "/nowhere", "/ready")
    }
    assert len(ids) == 3


# --- API keys ---


async def test_request_with_any_of_the_api_keys_is_accepted(make_api: Any) -> None:
    api = make_api(api_keys=["first", "second"])
    for authorization in ("Bearer first", "bearer second", "Bearer  first"):
        assert (await api.context("GET", "/v1/models", authorization=authorization)).status == 200


@pytest.mark.parametrize(
    "headers",
    [{}]
    + [{"authorization": value} for value in ("Bearer", "Bearer ", "Bearer wrong", "Basic first", "first", "Bearer é")],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/letters", "/nowhere"])
async def test_request_without_a_valid_api_key_is_refused(make_api: Any, headers: dict[str, str], path: str) -> None:
    exchange = await make_api(api_keys=["first"]).context("GET", path, **headers)
    assert exchange.status == 401
    assert exchange.response_headers["www-authenticate"].startswith("Bearer")
    assert exchange.json()["error"]["code"] == "invalid_api_key"


async def test_every_route_except_open_routes_needs_an_api_key(make_api: Any) -> None:
    api = make_api(api_keys=["first"])
    for operation in OPERATIONS:
        if "{" not in operation.path:
            status = (await api.context(operation.method, operation.path)).status
            assert (status == 401) == (operation.path not in OPEN), operation.path


def test_a_key_that_no_header_can_carry_is_refused_at_the_start(make_api: Any) -> None:
    for key in ("", "with blank", "é"):
        with pytest.raises(StartupError):
            _ = make_api(api_keys=[key]).app


# --- faults of the server ---


async def test_server_fault_is_a_500_without_details_and_a_log_line(api: Any, caplog: Any) -> None:
    api.engine.script = lambda *_: [ValueError("secret detail")]
    with caplog.at_level(logging.ERROR):
        exchange = await api.chat()
    assert exchange.status == 500
    assert exchange.json()["error"]["code"] == "internal_error"
    assert b"secret" not in exchange.data
    [record] = caplog.records
    assert exchange.response_headers["x-request-id"] in record.getMessage()
    assert record.exc_info is not None


async def test_server_fault_in_a_stream_is_its_last_event(api: Any) -> None:
    api.engine.script = lambda *_: [Delta(index=0, text="x", token_ids=(1,)), ValueError("secret detail")]
    exchange = await api.chat(stream=True)
    assert exchange.events()[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in exchange.data


async def test_server_fault_after_a_whole_response_began_breaks_the_connection(api: Any) -> None:
    exchange = api.exchange("GET", "/health")
    exchange.send_error = ValueError("half sent")
    with pytest.raises(ValueError, match="half sent"):
        await api.app(exchange)


# --- counting ---


async def test_requests_are_counted_by_route_and_status(api: Any) -> None:
    await api.chat()
    await api.chat(n=0)
    await api.context("GET", "/v1/models/letters")
    await api.context("GET", "/v1/models/org/letters")
    await api.context("GET", "/v1/models/nobody")
    for number in range(3):
        await api.context("GET", f"/scanned/{number}")
    assert counted(api) == {
        (CHAT, "200"): 1,
        (CHAT, "400"): 1,
        ("/v1/models/{model}", "200"): 2,
        ("/v1/models/{model}", "404"): 1,
        ("other", "404"): 3,
    }


async def test_open_requests_and_clients_that_left_are_counted(
    api: Any, autojump_clock: trio.testing.MockClock
) -> None:
    api.engine.queue = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.chat)
        await trio.testing.wait_all_tasks_blocked()
        assert b'trioserve:streams_open{model_name="letters"} 1.0' in api.engine.metrics.expose()
        nursery.cancel_scope.cancel()
    assert b'trioserve:streams_open{model_name="letters"} 0.0' in api.engine.metrics.expose()
    assert counted(api) == {(CHAT, "left"): 1}
