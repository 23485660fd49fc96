"""Tests that the server answers any bytes in a body with status 2xx or 4xx, and never with a server fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.http.exchange import BodyTimeout, BodyTooLarge, Headers

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

BROKEN = {
    "nothing": b"",
    "no JSON": b"hello",
    "a form": b"prompt=hello&n=1",
    "a multipart form": b"--x\r\ncontent-disposition: form-data; name=prompt\r\n\r\nhi\r\n--x--\r\n",
    "cut off": b'{"prompt": "a',
    "two values": b'{"prompt": "a"} {}',
    "a list": b"[]",
    "a string": b'"prompt"',
    "null": b"null",
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "broken UTF-8 in a known field": b'{"prompt": "\xff"}',
    "broken UTF-8 in an unknown field": b'{"prompt": "a", "messages": [{"role":"user","content":"a"}], "x": "\xff"}',
    "half a surrogate pair": b'{"prompt": "\\ud83d"}',
    "a control character": b'{"prompt": "a\x00"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "deep lists": b'{"prompt": ' + b"[" * 200_000,
    "deep objects in an unknown field": b'{"x": ' + b'{"x":' * 200_000,
}


HUGE = {
    "a float": b'{"prompt": "a", "temperature": 1e999}',
    "an integer": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a key": b'{"prompt": "a", "logit_bias": {"' + b"9" * 10_000 + b'": 1}}',
    "a token": b'{"prompt": [' + b"9" * 100 + b"]}",
    "a float as an integer": b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
    "a deadline": b'{"prompt": "a", "timeout": ' + b"9" * 400 + b"}",
    "more values than any prompt": b'{"prompt": [' + b"1," * 2_000_001 + b"1]}",
}

DEEP = {
    "a type in a content part": b'{"messages": [{"role": "user", "content": [{"type": %b}]}]}',
    "a content": b'{"messages": [{"role": "user", "content": %b}]}',
    "a field of a message": b'{"messages": [{"role": "user", "content": "a", "x": %b}]}',
    "tools": b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"a": %b}]}',
    "a tool choice": b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": {"a": %b}}',
    "template arguments": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %b}}',
    "a field that is refused": b'{"messages": [{"role": "user", "content": "a"}], "guided_json": %b}',
    "a field nobody knows": b'{"messages": [{"role": "user", "content": "a"}], "x": %b}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
async def test_malformed_body_is_refused_with_400(api: Any, path: str, body: bytes) -> None:
    exchange = await api.context("POST", path, body)
    assert exchange.status == 400, exchange.data
    assert exchange.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE.keys())
async def test_huge_number_in_a_body_is_refused_with_400(api: Any, body: bytes) -> None:
    exchange = await api.context("POST", "/v1/completions", body)
    assert exchange.status == 400, exchange.data


@pytest.mark.slow
@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP.keys())
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
async def test_deep_nesting_is_never_a_server_fault(api: Any, body: bytes, brackets: tuple[bytes, bytes]) -> None:
    """Just below the decoder's limit, later code that walks or prints the value could recurse too deeply."""
    opening, closing = brackets
    for depth in (*range(50, 80, 5), *range(800, 1020, 2)):
        value = opening * depth + b"1" + closing * depth
        exchange = await api.context("POST", "/v1/chat/completions", body.replace(b"%b", value))
        assert exchange.status in (200, 400), exchange.data
        if depth > 70 and body is not DEEP["a field nobody knows"]:
            assert exchange.status == 400


async def test_number_of_values_in_messages_is_bounded(api: Any) -> None:
    part = {"type": "text", "text": ""}
    for count, status in ((30_000, 200), (40_000, 400)):
        messages = [{"role": "user", "content": [part] * count}]
        exchange = await api.context("POST", "/tokenize", {"messages": messages})
        assert exchange.status == status


async def test_an_error_message_repeats_only_part_of_the_input(api: Any) -> None:
    """The response must not be as long as the refused body."""
    long = "x" * 1_000_000
    for body in (
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"messages": [{"role": "user", "content": "a"}], "model": long},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": long}},
    ):
        exchange = await api.context("POST", "/v1/chat/completions", body)
        assert exchange.status in (400, 404)
        assert len(exchange.data) < 3000
        assert "xxx" in exchange.json()["error"]["message"]


async def test_last_value_of_a_repeated_json_key_is_used(api: Any) -> None:
    exchange = await api.context("POST", "/v1/completions", b'{"prompt": "a", "n": 2, "prompt": "b", "n": 3}')
    assert len(exchange.json()["choices"]) == 3
    assert api.engine.streams[0].prompt == "b"
    for body in (b'{"prompt": "a", "n": "x", "n": 1}', b'{"prompt": "a", "n": 1, "n": "x"}'):
        assert (await api.context("POST", "/v1/completions", body)).status == 400


async def test_a_repeated_authorization_header_is_refused(make_api: Any) -> None:
    api = make_api(api_keys=["first"])
    exchange = api.exchange("GET", "/v1/models")
    exchange.headers = Headers([("authorization", "Bearer first"), ("authorization", "Bearer other")])
    await api.app(exchange)
    assert exchange.status == 401


async def test_unknown_body_fields_are_ignored(api: Any) -> None:
    body = b'{"prompt": "a", "x": [1, {"y": 1e999}], "": null, "\\u0000": true, "__class__": "a", "prompt ": 1}'
    exchange = await api.context("POST", "/v1/completions", body)
    assert exchange.status == 200, exchange.data


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "", "1_0", "\u0661", "9" * 5000])
@pytest.mark.parametrize("header", ["x-queue-timeout", "x-ttft-timeout", "x-request-timeout"])
async def test_deadlines_in_headers_are_numbers_or_refused(api: Any, header: str, value: str) -> None:
    exchange = await api.context("POST", "/v1/completions", {"prompt": "a"}, **{header: value})
    assert exchange.status in (200, 400), exchange.data


async def test_the_content_type_does_not_matter(api: Any) -> None:
    exchange = await api.context("POST", "/v1/completions", b'{"prompt": "a"}', content_type="text/plain")
    assert exchange.status == 200


async def test_a_body_that_is_too_large_or_too_slow_has_its_status(api: Any) -> None:
    for error, status in ((BodyTooLarge("9 bytes"), 413), (BodyTimeout("too slow"), 408)):
        exchange = api.exchange("POST", "/v1/completions", b"{}")
        exchange.body_error = error
        await api.app(exchange)
        assert exchange.status == status
        assert exchange.json()["error"]["message"] == str(error)


KNOWN_NAMES = (
    "prompt",
    "messages",
    "tokens",
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "response_format",
    "priority",
    "cache_salt",
    "add_special_tokens",
    "continue_final_message",
    "best_of",
    "suffix",
    "chat_template_kwargs",
    "role",
    "content",
    "type",
    "text",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "text", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN_NAMES), inner, max_size=4),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(KNOWN_NAMES), VALUES, max_size=8)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(fields=BODIES)
@pytest.mark.parametrize("path", PATHS)
def test_any_json_object_gets_a_response_without_a_fault(make_api: Any, path: str, fields: dict[str, Any]) -> None:
    minimal = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/completions": {"prompt": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }[path]

    async def check() -> None:
        api = make_api()
        exchange = await api.context("POST", path, json.dumps({**minimal, **fields}).encode())
        assert exchange.status in (200, 400), exchange.data
        assert api.left()

    trio.run(check)
