"""Tests that errors on every path have the format of the requested API, and that API keys are read from the headers of
that API.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from anthropic.types import ModelInfo
from anthropic.types.shared import ErrorResponse

MESSAGES = "/v1/messages"


def check_error(exchange: Any, status: int, kind: str) -> str:
    """Check the error and return its message."""
    assert exchange.status == status, exchange.data
    said = exchange.json()
    assert set(said) == {"type", "error", "request_id"}
    assert said["type"] == "error"
    assert set(said["error"]) == {"type", "message"}
    assert said["error"]["type"] == kind
    assert said["request_id"] == exchange.response_headers["request-id"] == exchange.response_headers["x-request-id"]
    if kind not in ("request_too_large", "conflict_error"):  # The client library lacks these error types of the API.
        ErrorResponse.model_validate(said, strict=True)
    return said["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages/nothing", "/v1/messages/"])
async def test_an_unknown_path_of_an_api_is_404_in_its_format(api: Any, path: str) -> None:
    check_error(await api.context("GET", path), 404, "not_found_error")


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/message", "/v1"])
async def test_a_path_that_only_resembles_the_apis_path_has_openais_format(api: Any, path: str) -> None:
    exchange = await api.context("GET", path)
    assert exchange.json()["error"]["code"] == "not_found"
    assert "request-id" not in exchange.response_headers


async def test_the_version_header_selects_the_format_of_errors_on_every_path(api: Any) -> None:
    exchange = await api.context("GET", "/v1/models/nobody", anthropic_version="2023-06-01")
    assert check_error(exchange, 404, "not_found_error").startswith("model: ")


async def test_the_version_header_selects_the_format_of_models(api: Any) -> None:
    listed = (await api.context("GET", "/v1/models", anthropic_version="2023-06-01")).json()
    models = [ModelInfo.model_validate(model) for model in listed["data"]]
    assert [model.id for model in models] == ["letters", "org/letters"]
    assert (listed["has_more"], listed["last_id"]) == (False, "org/letters")
    assert models[0].created_at.isoformat() == "2023-11-14T22:13:20+00:00"
    one = await api.context("GET", "/v1/models/org/letters", anthropic_version="2023-06-01")
    assert ModelInfo.model_validate(one.json()).display_name == "org/letters"


async def test_a_wrong_key_is_an_error_in_the_apis_format_and_never_logged(make_api: Any, caplog: Any) -> None:
    api = make_api(api_keys=["first"])
    with caplog.at_level(logging.DEBUG):
        for headers in ({}, {"x_api_key": "wrong-key"}, {"authorization": "Bearer wrong-key"}):
            check_error(await api.context("POST", MESSAGES, {}, **headers), 401, "authentication_error")
    assert caplog.records
    assert "wrong-key" not in caplog.text


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"x_api_key": "first"}, 200),
        ({"x_api_key": " first "}, 200),
        ({"x_api_key": "second", "authorization": "Bearer wrong"}, 200),
        ({"x_api_key": "wrong", "authorization": "Bearer first"}, 200),
        ({"x_api_key": "Bearer first"}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": "wrong"}, 401),
    ],
)
async def test_a_key_is_accepted_in_either_header_on_every_path(
    make_api: Any, headers: dict[str, str], status: int
) -> None:
    api = make_api(api_keys=["first", "second"])
    assert (await api.context("GET", "/v1/models", **headers)).status == status


async def test_the_key_in_authorization_takes_precedence(make_api: Any) -> None:
    api = make_api(api_keys=["first"], admin_api_key="admin")
    body = {"prompt": "a"}
    await api.context("POST", "/v1/completions", body, authorization="Bearer admin", x_api_key="first")
    await api.context("POST", "/v1/completions", body, authorization="Bearer first", x_api_key="admin")
    assert [options["owner"] is None for options in api.engine.options] == [True, False]
