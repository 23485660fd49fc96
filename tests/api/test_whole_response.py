"""Tests whole responses: requests for responses that are too large are refused, and large responses do not block the
event loop.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
import trio

from trioserve.api.caller import AccessRules
from trioserve.api.request_context import RequestContext
from trioserve.api.whole_response import PIECE_BYTES, PLAIN, LargeJson, ResponseBound, ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.memory_server import open_memory_server

CONTEXT = 131_072


def bounded(shape: ResponseShape = PLAIN, *, tokens_max: int = CONTEXT, **sampling: Any) -> SamplingParams:
    return ResponseBound().bounded(SamplingParams(**sampling), shape, tokens_max=tokens_max, default_tokens_max=None)


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        (ResponseShape(), {"max_tokens": CONTEXT}),
        (ResponseShape(has_token_ids=True), {"max_tokens": CONTEXT, "n": 8}),
        (ResponseShape(), {"max_tokens": 4096, "n": 16, "logprobs": 5}),
        (ResponseShape(prompt_count=128), {"max_tokens": 256, "logprobs": 5}),
        (ResponseShape(is_streamed=True), {"max_tokens": CONTEXT, "n": 128, "logprobs": 20}),
    ],
    ids=str,
)
def test_whole_response_with_usual_output_is_neither_refused_nor_shortened(shape, sampling):
    assert bounded(shape, **sampling) == SamplingParams(**sampling)


@pytest.mark.parametrize(
    ("shape", "sampling", "tokens"),
    [
        (ResponseShape(prompt_copies=1), {"prompt_logprobs": 1}, 128 * 4000),
        (ResponseShape(prompt_copies=1, has_prompt_text=True), {"prompt_logprobs": 20, "logprobs": 20}, 8192),
        (ResponseShape(prompt_copies=1, has_prompt_text=True), {"prompt_logprobs": 5, "logprobs": 5}, 128 * 2000),
        (ResponseShape(has_token_ids=True, prompt_copies=128), {}, CONTEXT // 8),
    ],
    ids=str,
)
def test_usual_prompts_are_not_refused(shape, sampling, tokens):
    ResponseBound().check_prompts(SamplingParams(**sampling), shape, tokens)


@pytest.mark.parametrize(("count", "dimensions", "is_base64"), [(2048, 1536, False), (2048, 4096, True)])
def test_usual_vectors_are_not_refused(count, dimensions, is_base64):
    ResponseBound().check_vectors(count, dimensions, is_base64=is_base64)


def test_the_refusal_of_large_output_names_the_estimate_and_the_limit():
    with pytest.raises(InvalidRequest) as caught:
        bounded(max_tokens=2000, n=64, logprobs=20)
    message = str(caught.value)
    assert "about 215,808,000 bytes" in message
    assert "1 prompts x 64 choices x 2000 tokens x (6 bytes of text + 80 x (20 logprobs + 1))" in message
    assert "134,217,728" in message
    assert "set stream" in message
    assert "--max-response-bytes" in message


def test_the_estimate_counts_output_up_to_the_context_length():
    assert bounded(tokens_max=4096, max_tokens=10**9, logprobs=20).max_tokens == 10**9


def test_output_without_max_tokens_gets_as_many_tokens_as_fit():
    given = bounded(n=4, logprobs=20).max_tokens
    assert given is not None
    assert 4 * given * (6 + 80 * 21) <= ResponseBound().bytes_max < 4 * (given + 1) * (6 + 80 * 21)
    assert bounded(n=1, logprobs=1).max_tokens is None
    with pytest.raises(InvalidRequest):
        bounded(ResponseShape(prompt_count=128), n=8, logprobs=20)


SMALL = AccessRules(response_bytes_max=20_000)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "choices": ("/v1/completions", {"prompt": "a", "n": 8, "max_tokens": 100, "logprobs": 5}),
    "best_of": ("/v1/completions", {"prompt": "a", "best_of": 8, "max_tokens": 100, "logprobs": 5}),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 8, "max_tokens": 100, "logprobs": 5}),
    "echo": ("/v1/completions", {"prompt": "a" * 90, "n": 4, "max_tokens": 0, "echo": True, "logprobs": 3}),
    "prompt_logprobs": ("/v1/completions", {"prompt": "a" * 90, "n": 4, "max_tokens": 1, "prompt_logprobs": 3}),
    "streamed echo": (
        "/v1/completions",
        {"prompt": "a" * 90, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "n": 8, "max_tokens": 100, "logprobs": True},
    ),
    "chat's prompt": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a" * 80}], "max_tokens": 1, "prompt_logprobs": 20},
    ),
    "response": (
        "/v1/responses",
        {
            "model": "fake",
            "input": "a",
            "max_output_tokens": 100,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        },
    ),
    "streamed response that repeats them": (
        "/v1/responses",
        {"model": "fake", "input": "a", "max_output_tokens": 100, "top_logprobs": 20, "stream": True},
    ),
    "vectors": ("/v1/embeddings", {"input": ["a"] * 400}),
    "Ollama's vectors": ("/api/embed", {"model": "fake", "input": ["a"] * 400}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_every_api_refuses_a_too_large_response_and_counts_no_bytes(autojump_clock, name):
    path, body = REFUSED[name]
    async with open_memory_server(access=SMALL, max_model_len=256, block_count=256, max_num_seqs=16) as server:
        response = await server.client().post(path, body)
        told = (await response.read()).decode()
        assert response.status == 400, told
        assert "the response could have about" in told
        assert "allowed are 20,000" in told
        await trio.sleep(1)  # The step in flight ends in this time.
        server.engine.assert_all_free()


MESSAGE = [{"role": "user", "content": "a"}]
STREAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 100},
    "/v1/chat/completions": {"messages": MESSAGE, "max_tokens": 100},
    "/v1/messages": {"messages": MESSAGE, "model": "fake", "max_tokens": 100},
    "/api/chat": {"messages": MESSAGE, "model": "fake", "options": {"num_predict": 100}},
    "/api/generate": {"prompt": "a", "model": "fake", "options": {"num_predict": 100}},
}


@pytest.mark.parametrize("path", STREAMED)
async def test_size_limit_of_responses_does_not_apply_to_the_total_of_a_stream(autojump_clock, path):
    """A whole response with 50 tokens would be allowed."""
    async with open_memory_server(
        access=AccessRules(response_bytes_max=300),
        max_model_len=256,
        block_count=256,
        next_token=lambda _ids: ord("a"),
    ) as server:
        response = await server.client().post(path, {**STREAMED[path], "stream": True})
        assert response.status == 200
        metrics = (await server.client().get("/metrics")).body.decode()
        assert re.search(r"^vllm:generation_tokens_total\{.*\} 100\.0$", metrics, re.MULTILINE)
        assert server.app.responses.bytes_held == 0


async def turns_while(act: Any) -> tuple[int, Any]:
    """Return how often another task ran while `act` ran."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        result = await act()
        nursery.cancel_scope.cancel()
    return turns, result


class Columns(msgspec.Struct):
    a: list[int]
    b: list[str]


async def test_large_lists_are_encoded_in_pieces_and_decode_to_the_same_value():
    items = list(range(60_000))
    vectors = [[float(index)] * 4000 for index in range(20)]
    text = 'a"\\\n\u2028é😀' * 100_000

    async def encode() -> bytes:
        large = LargeJson()
        value = {
            "small": await large.add([1, 2], list),
            "items": await large.add(items, list),
            "columns": await large.add_columns(items, lambda part: Columns([*part], [str(one) for one in part])),
            "vectors": await large.add_one_by_one([(4000, lambda one=one: one) for one in vectors]),
            "none": await large.add_one_by_one([]),
            "text": await large.add_text(text),
            "end": "end",
        }
        pieces = list(large.pieces(value))
        assert max(map(len, pieces)) <= 3 * PIECE_BYTES
        return b"".join(pieces)

    turns, encoded = await turns_while(encode)
    assert turns > 60
    assert json.loads(encoded) == {
        "small": [1, 2],
        "items": items,
        "columns": {"a": items, "b": [str(one) for one in items]},
        "vectors": vectors,
        "none": [],
        "text": text,
        "end": "end",
    }


LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "abc", "n": 4, "max_tokens": 400, "logprobs": 20, "ignore_eos": True}),
    "echo": ("/v1/completions", {"prompt": "a" * 400, "max_tokens": 1, "logprobs": 20, "echo": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "logprobs": True, "top_logprobs": 20},
    ),
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_response_has_the_same_value_as_a_small_response(autojump_clock, name, monkeypatch):
    path, body = LARGE[name]
    values = []
    for small_items_max in (10**9, 10):
        monkeypatch.setattr("trioserve.api.whole_response.SMALL_ITEMS_MAX", small_items_max)
        async with open_memory_server(max_model_len=1024, block_count=1024) as server:
            response = await server.client().post(path, {**body, "seed": 1, "ignore_eos": True})
            assert response.status == 200
            values.append(json.loads(await response.read())["choices"])
            assert server.engine.metrics.large_response_bytes._value.get() == 0
    assert values[0] == values[1]


async def test_logprobs_of_a_large_response_object_are_encoded_in_pieces(autojump_clock, monkeypatch):
    sent = []
    for small_items_max in (10**9, 10):
        monkeypatch.setattr("trioserve.api.whole_response.SMALL_ITEMS_MAX", small_items_max)
        async with open_memory_server(max_model_len=1024, block_count=1024) as server:
            body = {"model": "fake", "input": "a", "max_output_tokens": 300, "top_logprobs": 5, "store": False}
            body["include"] = ["message.output_text.logprobs"]
            noted: list[int] = []
            monkeypatch.setattr(RequestContext, "note_large_bytes", lambda _, change, noted=noted: noted.append(change))
            response = await server.client().post("/v1/responses", body)
            assert response.status == 200
            [part] = json.loads(await response.read())["output"][0]["content"]
            assert bool(noted) == (small_items_max == 10)
            sent.append([len(part["logprobs"]), [sorted(entry) for entry in part["logprobs"]]])
    assert sent[0] == sent[1]
    assert sent[0][0] == 300


async def test_a_client_that_leaves_ends_the_encoding(autojump_clock):
    with trio.move_on_after(0) as scope:
        await LargeJson().add(range(10**9), list)
    assert scope.cancelled_caught


# --- all whole responses together ---

# The response has about 340,000 bytes.
WITH_LOGPROBS = {"prompt": "a", "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
ROOM_FOR_TWO = AccessRules(responses_bytes_max=800_000)


async def test_large_responses_share_a_limit_and_small_responses_are_not_refused(autojump_clock):
    async with open_memory_server(access=ROOM_FOR_TWO, max_model_len=256, block_count=512, max_num_seqs=16) as server:
        statuses: list[tuple[int, str | None]] = []
        small: list[int] = []

        async def ask_large() -> None:
            response = await server.client().post("/v1/completions", WITH_LOGPROBS)
            statuses.append((response.status, response.headers.get("retry-after")))
            await response.read()

        async def ask_small() -> None:
            response = await server.client().post("/v1/completions", {"prompt": "a", "max_tokens": 200})
            small.append(response.status)
            await response.read()

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask_large)
                nursery.start_soon(ask_small)
        assert sorted(status for status, _ in statuses)[0] == 200
        assert {entry for entry in statuses if entry[0] != 200} == {(429, "1")}
        assert small == [200] * 6
        assert server.app.responses.bytes_held == 0
        await trio.sleep(1)  # The step in flight ends in this time.
        server.engine.assert_all_free()
        await ask_large()  # The budget has space again.
        assert statuses[-1][0] == 200


@pytest.mark.parametrize("name", ["chat", "vectors", "prompt"])
async def test_every_kind_of_large_response_counts_until_it_ends(autojump_clock, name):
    path, body = {
        "chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "logprobs": True, "top_logprobs": 20},
        ),
        "vectors": ("/v1/embeddings", {"input": ["a"] * 600}),
        "prompt": ("/v1/completions", {"prompt": "a" * 200, "max_tokens": 1, "echo": True, "logprobs": 20}),
    }[name]
    access = AccessRules(responses_bytes_max=100_000)
    async with open_memory_server(access=access, max_model_len=256, block_count=512, max_num_seqs=16) as server:
        response = await server.client().post(path, {**body, "ignore_eos": True} if name != "vectors" else body)
        told = (await response.read()).decode()
        assert response.status == 429, told
        assert "--max-responses-bytes" in told
        assert server.app.responses.bytes_held == 0
        await trio.sleep(1)
        server.engine.assert_all_free()


async def test_client_that_leaves_releases_the_bytes_of_its_large_response(autojump_clock):
    async with open_memory_server(access=ROOM_FOR_TWO, max_model_len=256, block_count=512) as server:
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.client().post, "/v1/completions", WITH_LOGPROBS)
                while server.app.responses.bytes_held == 0:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        await trio.sleep(1)
        assert server.app.responses.bytes_held == 0
        server.engine.assert_all_free()
