"""Errors in the shape of the API that was asked, wherever they come from; and keys in the header that it uses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from anthropic.types import ModelInfo
from anthropic.types.shared import ErrorResponse

MESSAGES = "/v1/messages"


def check_error(exchange: Any, status: int, kind: str) -> str:
    """The error's message."""
    assert exchange.status == status, exchange.data
    said = exchange.json()
    assert set(said) == {"type", "error", "request_id"}
    assert said["type"] == "error"
    assert set(said["error"]) == {"type", "message"}
    assert said["error"]["type"] == kind
    assert said["request_id"] == exchange.response_headers["request-id"] == exchange.response_headers["x-request-id"]
    if kind not in ("request_too_large", "conflict_error"):  # names of the API that its own types lack
        ErrorResponse.model_validate(said, strict=True)
    return said["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages/nothing", "/v1/messages/"])
async def test_an_unknown_path_of_an_api_is_404_in_its_shape(api: Any, path: str) -> None:
    check_error(await api.context("GET", path), 404, "not_found_error")


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/message", "/v1"])
async def test_what_only_looks_like_its_path_has_the_shape_of_the_others(api: Any, path: str) -> None:
    exchange = await api.context("GET", path)
    assert exchange.json()["error"]["code"] == "not_found"
    assert "request-id" not in exchange.response_headers


async def test_who_names_the_apis_version_gets_its_shape_everywhere(api: Any) -> None:
    exchange = await api.context("GET", "/v1/models/nobody", anthropic_version="2023-06-01")
    assert check_error(exchange, 404, "not_found_error").startswith("model: ")


async def test_who_names_the_apis_version_is_told_the_models_in_its_shape(api: Any) -> None:
    listed = (await api.context("GET", "/v1/models", anthropic_version="2023-06-01")).json()
    models = [ModelInfo.model_validate(model) for model in listed["data"]]
    assert [model.id for model in models] == ["letters", "org/letters"]
    assert (listed["has_more"], listed["last_id"]) == (False, "org/letters")
    assert models[0].created_at.isoformat() == "2023-11-14T22:13:20+00:00"
    one = await api.context("GET", "/v1/models/org/letters", anthropic_version="2023-06-01")
    assert ModelInfo.model_validate(one.json()).display_name == "org/letters"


async def test_a_wrong_key_is_told_in_the_apis_shape_and_never_logged(make_api: Any, caplog: Any) -> None:
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
async def test_a_key_counts_in_either_header_on_every_path(make_api: Any, headers: dict[str, str], status: int) -> None:
    api = make_api(api_keys=["first", "second"])
    assert (await api.context("GET", "/v1/models", **headers)).status == status


async def test_of_two_keys_that_of_the_authorization_counts(make_api: Any) -> None:
    api = make_api(api_keys=["first"], admin_api_key="admin")
    body = {"prompt": "a"}
    await api.context("POST", "/v1/completions", body, authorization="Bearer admin", x_api_key="first")
    await api.context("POST", "/v1/completions", body, authorization="Bearer first", x_api_key="admin")
    assert [options["owner"] is None for options in api.engine.options] == [True, False]
