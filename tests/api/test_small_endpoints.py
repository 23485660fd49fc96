"""Tests the endpoints for models and tokenization, and the operators' small endpoints."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Model

from trioserve.contracts.errors import EngineFault
from trioserve.testing import open_memory_server
from trioserve.testing.byte_tokenizer import CHAT_TEMPLATE, END_TOKEN

# --- models ---


async def test_every_served_name_is_a_model(api: Any) -> None:
    response = (await api.context("GET", "/v1/models")).json()
    assert response["object"] == "list"
    models = [Model.model_validate(model, strict=True) for model in response["data"]]
    assert [model.id for model in models] == ["letters", "org/letters"]
    assert {model["max_model_len"] for model in response["data"]} == {100}


async def test_model_route_returns_a_model_by_its_name(api: Any) -> None:
    model = Model.model_validate((await api.context("GET", "/v1/models/org/letters")).json(), strict=True)
    assert (model.id, model.created) == ("org/letters", 1_700_000_000)


async def test_model_route_of_a_model_that_is_not_served_gives_404(api: Any) -> None:
    exchange = await api.context("GET", "/v1/models/gpt-9")
    assert exchange.status == 404
    assert exchange.json()["error"]["code"] == "model_not_found"


# --- tokenize and detokenize ---


@pytest.mark.parametrize(
    "body, tokens",
    [
        ({"prompt": "ab"}, [1, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"prompt": ""}, [1]),
        ({"messages": [{"role": "user", "content": "a"}]}, [1, *map(ord, "user: a")]),
    ],
)
async def test_tokenize_accepts_a_prompt_or_a_chat(api: Any, body: dict[str, Any], tokens: list[int]) -> None:
    response = (await api.context("POST", "/tokenize", body)).json()
    assert response == {"count": len(tokens), "max_model_len": 100, "tokens": tokens, "token_strs": None}


async def test_tokenize_returns_tokens_also_as_strings_if_requested(api: Any) -> None:
    response = (await api.context("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert response["token_strs"] == ["\x01", "a", "b"]


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"prompt": ["a"]}, "prompt"),
    ],
)
async def test_an_invalid_tokenize_body_is_refused(api: Any, body: dict[str, Any], param: str) -> None:
    await api.check_refused("/tokenize", body, param=param)


async def test_tokenize_with_an_unknown_model_is_404(api: Any) -> None:
    await api.check_refused("/tokenize", {"prompt": "a", "model": "gpt-9"}, status=404, param="model")
    await api.check_refused("/detokenize", {"tokens": [1], "model": "gpt-9"}, status=404, param="model")


async def test_detokenize_returns_the_text_of_tokens(api: Any) -> None:
    assert (await api.context("POST", "/detokenize", {"tokens": [97, 98]})).json() == {"prompt": "ab"}
    assert (await api.context("POST", "/detokenize", {"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tokens": [97, -1]}, "tokens[1]"),
        ({"tokens": [0x110000]}, "tokens[0]"),
        ({"tokens": "ab"}, "tokens"),
        ({}, "tokens"),
    ],
)
async def test_an_invalid_token_id_is_refused(api: Any, body: dict[str, Any], param: str) -> None:
    await api.check_refused("/detokenize", body, param=param)


async def test_tokenizer_info_has_the_data_to_count_tokens(api: Any) -> None:
    info = (await api.context("GET", "/tokenizer_info")).json()
    assert info["bos_token"] == "\x01"
    assert {info[name] for name in ("eos_token", "pad_token", "chat_template")} == {None}
    assert (info["vocab_size"], info["model_max_length"]) == (0x110000, 100)


async def test_tokenizer_info_of_real_files_has_special_tokens_and_template() -> None:
    async with open_memory_server() as server:
        info = await (await server.client().get("/tokenizer_info")).json()
    assert (info["eos_token"], info["bos_token"]) == (END_TOKEN, None)
    assert info["chat_template"] == CHAT_TEMPLATE


# --- operations ---


async def test_health_reports_the_process_and_ready_reports_requests(api: Any) -> None:
    async def statuses() -> tuple[int, int, str | None]:
        health, ready = await api.context("GET", "/health"), await api.context("GET", "/ready")
        return health.status, ready.status, ready.json().get("reason")

    assert await statuses() == (200, 200, None)
    api.engine.ready = False
    assert await statuses() == (200, 503, "loading")
    api.engine.draining = True
    assert await statuses() == (200, 503, "draining")
    api.engine.fault = EngineFault("x")
    assert await statuses() == (200, 503, "engine_fault")


async def test_version_route_returns_a_string(api: Any) -> None:
    assert isinstance((await api.context("GET", "/version")).json()["version"], str)


async def test_metrics_have_prometheus_text_format(api: Any) -> None:
    await api.chat()
    exchange = await api.context("GET", "/metrics")
    assert exchange.response_headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'http_requests_total{model_name="letters",path="/v1/chat/completions",status="200"} 1.0' in exchange.data
