"""Tests that the OpenAPI document describes every route, and matches the responses of the routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from trioserve.api import responder, surface
from trioserve.api.error_responses import Error
from trioserve.api.openai import models, tokenize
from trioserve.api.openai import response_types as responses
from trioserve.api.openai.request_types import REFUSED
from trioserve.api.operations import health
from trioserve.api.routes import OPERATIONS
from trioserve.contracts.errors import Overloaded

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
EVERYTHING = {"n": 2, "prompt_logprobs": 1, "return_token_ids": True}


async def described(api: Any) -> dict[str, Any]:
    exchange = await api.context("GET", "/openapi.json")
    assert exchange.status == 200
    return exchange.json()


def test_every_operation_is_declared_once_and_described() -> None:
    declared = [(operation.method, operation.path) for operation in OPERATIONS]
    assert len(set(declared)) == len(declared)
    assert all(operation.summary for operation in OPERATIONS)


async def test_the_document_names_every_path_and_who_may_use_it(make_api: Any) -> None:
    document = await described(
        make_api(api_keys=["first"])
    )  # No key is needed, because programs read the document before they have a key.
    assert document["openapi"] == "3.1.0"
    assert {(method.upper(), path) for path, methods in document["paths"].items() for method in methods} == {
        (operation.method, operation.path) for operation in OPERATIONS
    }
    for operation in OPERATIONS:
        shown = document["paths"][operation.path][operation.method.lower()]
        assert bool(shown["security"]) == ("401" in shown["responses"]) == operation.needs_key


async def test_every_reference_in_the_openapi_document_has_a_target(api: Any) -> None:
    document = await described(api)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                name = value["$ref"].removeprefix("#/components/schemas/")
                assert name in document["components"]["schemas"]
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


async def test_sections_of_docstrings_become_descriptions_of_properties(api: Any) -> None:
    schemas = (await described(api))["components"]["schemas"]
    for name, schema in schemas.items():
        description = schema.get("description", "")
        assert not re.search(r"^(Attributes|Args|Returns|Raises):", description, re.MULTILINE), name
    assert any("description" in part for part in schemas["ChatMessage"]["properties"].values())


async def test_openapi_document_does_not_offer_refused_fields(api: Any) -> None:
    schemas = (await described(api))["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody"):
        for field in REFUSED:
            if field in schemas[name]["properties"]:
                assert schemas[name]["properties"][field]["type"] == "null"
    assert schemas["CompletionBody"]["required"] == ["prompt"]


@pytest.mark.parametrize(
    "method, path, body, kind",
    [
        ("POST", "/v1/chat/completions", CHAT, responses.ChatCompletion),
        ("POST", "/v1/chat/completions", {**CHAT, **EVERYTHING, "logprobs": True}, responses.ChatCompletion),
        ("POST", "/v1/completions", {"prompt": "ab"}, responses.Completion),
        ("POST", "/v1/completions", {"prompt": "ab", **EVERYTHING, "logprobs": 1, "echo": True}, responses.Completion),
        ("GET", "/v1/models", None, models.Models),
        ("GET", "/v1/models/org/letters", None, models.Model),
        ("GET", "/v1/models/nobody", None, Error),
        ("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True}, tokenize.Tokenized),
        ("POST", "/detokenize", {"tokens": [97]}, tokenize.Detokenized),
        ("POST", "/detokenize", {"tokens": "a"}, Error),
        ("GET", "/nowhere", None, Error),
        ("GET", "/health", None, health.Alive),
        ("GET", "/ready", None, health.Ready),
        ("GET", "/version", None, health.Version),
    ],
)
async def test_responses_are_encoded_from_their_openapi_description(
    api: Any, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any, kind: type
) -> None:
    encoded: list[type] = []

    def note(value: object) -> bytes:
        encoded.append(type(value))
        return msgspec.json.encode(value)

    monkeypatch.setattr(responder, "encode", note)
    monkeypatch.setattr(surface, "encode", note)
    exchange = await api.context(method, path, b"" if body is None else body)
    assert encoded == [kind]
    msgspec.convert(exchange.json(), kind)


@pytest.mark.parametrize(
    "path, body, kind",
    [
        ("/v1/chat/completions", CHAT, responses.ChatCompletionChunk),
        ("/v1/completions", {"prompt": "ab"}, responses.Completion),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "return_token_ids": True, "logprobs": 1, "echo": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
async def test_stream_events_match_their_openapi_description(
    api: Any, path: str, body: dict[str, Any], kind: type, fields: dict[str, Any]
) -> None:
    if "chat" in path and "logprobs" in fields:
        fields = {**fields, "logprobs": True}
    *events, done = (await api.context("POST", path, {**body, **fields, "stream": True})).events()
    assert done == "[DONE]"
    assert len(events) >= 2
    for event in events:
        msgspec.convert(event, kind)


async def test_responses_of_unready_and_busy_servers_match_their_description(api: Any) -> None:
    api.engine.ready = False
    msgspec.convert((await api.context("GET", "/ready")).json(), health.NotReady)
    api.engine.enter_errors = [Overloaded("too much", reason="queue_full", retry_after_seconds=2.5)]
    exchange = await api.complete()
    msgspec.convert(exchange.json(), Error)
    for name in ("retry-after", "x-trioserve-reason", "x-request-id"):
        assert name in exchange.response_headers
