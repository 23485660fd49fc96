"""Tests /v1/embeddings with a real engine and a scripted model: input types, errors with their path, disconnects."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import trio
from openai.types import CreateEmbeddingResponse
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.pooling import Pooling, PoolingResult
from trioserve.testing import MemoryServer, MemoryTransport, open_memory_server
from trioserve.testing.fake_executor import FakeModel

PATH = "/v1/embeddings"


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[MemoryServer]:
    async with open_memory_server(**options) as server:
        yield server
        await trio.sleep(1)  # A step in flight ends in this time.
        await server.assert_all_free()


async def ask(server: MemoryServer, body: dict[str, Any], path: str = PATH, **headers: str) -> tuple[int, Any]:
    async with server.client().ask(path, body, headers=headers) as response:
        return await response.head(), await response.json()


async def check_refused(server: MemoryServer, body: dict[str, Any], param: str | None, words: str = "") -> None:
    status, value = await ask(server, body)
    assert status == 400, value
    assert value["error"]["param"] == param
    assert words in value["error"]["message"]


def expected(text: str, **asked: Any) -> list[float]:
    model = FakeModel(vocab_size=256)
    pooling = Pooling(**{"task": "embed", "method": "last", "normalize": True} | asked)
    return model.pooled(pooling, model.digest(list(text.encode()))).values()


@pytest.mark.parametrize(
    "given, texts",
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        (list(b"one"), ["one"]),
        ([list(b"one"), list(b"two")], ["one", "two"]),
    ],
)
async def test_every_type_of_input_gets_vectors(given: Any, texts: list[str], autojump_clock: Any) -> None:
    async with served() as server:
        status, response = await ask(server, {"input": given, "model": "fake", "user": "somebody"})
        assert status == 200
        CreateEmbeddingResponse.model_validate(response, strict=True)
        assert [entry["embedding"] for entry in response["data"]] == [expected(text) for text in texts]
        assert [entry["index"] for entry in response["data"]] == list(range(len(texts)))
        count = sum(map(len, texts))
        assert response["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
        assert response["model"] == "fake"


async def test_base64_vectors_have_the_same_numbers_as_lists(autojump_clock: Any) -> None:
    async with served() as server:
        _, response = await ask(server, {"input": ["one", "two"], "encoding_format": "base64"})
        vectors = [PoolingResult(base64.b64decode(entry["embedding"])).values() for entry in response["data"]]
        assert vectors == [expected("one"), expected("two")]


async def test_the_official_client_reads_embeddings(autojump_clock: Any) -> None:
    """The client asks for base64 by default."""
    async with (
        served() as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        response = await client.embeddings.create(model="fake", input=["one", "two"], dimensions=4)
        assert [entry.embedding for entry in response.data] == [
            pytest.approx(expected(text, dimensions=4)) for text in ("one", "two")
        ]
        response = await client.embeddings.create(model="fake", input="one", encoding_format="float")
        assert response.data[0].embedding == expected("one")


async def test_a_chat_is_rendered_without_a_generation_prompt(autojump_clock: Any) -> None:
    async with served() as server:
        _, response = await ask(server, {"messages": [{"role": "user", "content": "hi"}]})
        assert response["data"][0]["embedding"] == expected("user: hi\n")


async def test_dimensions_pooling_and_normalize_change_the_vector(autojump_clock: Any) -> None:
    async with served() as server:
        _, response = await ask(server, {"input": "one", "dimensions": 3, "normalize": False, "pooling": "mean"})
        assert response["data"][0]["embedding"] == expected("one", dimensions=3, normalize=False, method="mean")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"truncate_prompt_tokens": 3}, "abc"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "xyz"),
        ({"truncate_prompt_tokens": -1}, "abcdefghijkl"),
        ({"truncate_prompt_tokens": 100, "truncation_side": "left"}, "opqrstuvwxyz"),
    ],
)
async def test_long_embedding_input_is_truncated_on_the_requested_side(
    fields: dict[str, Any], text: str, autojump_clock: Any
) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    async with served(max_model_len=12) as server:
        for given in (letters, list(letters.encode())):
            status, response = await ask(server, {"input": given, **fields})
            assert status == 200, response
            assert response["data"][0]["embedding"] == expected(text)
            assert response["usage"]["prompt_tokens"] == len(text)


async def test_2048_embedding_inputs_are_accepted_and_more_are_refused(autojump_clock: Any) -> None:
    async with served(max_num_seqs=8, max_queued_requests=2, max_num_batched_tokens=64) as server:
        status, response = await ask(server, {"input": ["x"] * 2048, "encoding_format": "base64"})
        assert status == 200
        assert len(response["data"]) == 2048
        await check_refused(server, {"input": ["x"] * 2049}, "input", "input has 2049 entries, at most 2048")


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({}, "input", "send either input or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "send either"),
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input[1]", "input[1] has no tokens"),
        ({"input": [[1], []]}, "input[1]", "no tokens"),
        ({"input": ["a", 1]}, "input", "mixes"),
        ({"input": [1, 400]}, "input", "token id 400"),
        ({"input": [[1], [-1]]}, "input[1]", "token id -1"),
        (
            {"input": ["a", "x" * 200, "x" * 300]},
            "input[1]",
            "maximum context length is 128 tokens, and input[1] has 200",
        ),
        ({"input": "x" * 200}, "input", "maximum context length is 128 tokens, and input has 200"),
        ({"input": "x" * 26, "pooling": "mean"}, "input", "25 tokens for inputs that are computed in one step"),
        ({"input": 5}, "input", ""),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions is 9, but vectors of fake have 8"),
        ({"input": "a", "pooling": "cls"}, "pooling", "decoder"),
        ({"input": "a", "pooling": "max"}, "pooling", "max"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "allowed is 1 or more, or -1"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ">= -1"),
        ({"input": "a", "priority": 1000}, "priority", "<= 100"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "1 to 256"),
        ({"messages": []}, "messages", "messages is empty"),
    ],
)
async def test_invalid_field_of_an_embedding_request_is_refused_with_its_path(
    body: dict[str, Any], param: str, words: str, autojump_clock: Any
) -> None:
    async with served(max_model_len=128) as server:
        await check_refused(server, body, param, words)


async def test_embeddings_of_a_model_that_is_not_served_get_404(autojump_clock: Any) -> None:
    async with served() as server:
        status, response = await ask(server, {"input": "a", "model": "other"})
        assert (status, response["error"]["code"]) == (404, "model_not_found")


async def test_an_encoder_serves_vectors_and_refuses_to_generate_text(autojump_clock: Any) -> None:
    async with served(encoder="embed") as server:
        _, response = await ask(server, {"input": ["one", "two"]})
        assert response["data"][1]["embedding"] == expected("two", method="mean")
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            status, response = await ask(server, body, path)
            assert status == 400
            assert (
                "fake is an encoder and does not generate text: ask it for embeddings" in response["error"]["message"]
            )


@pytest.mark.parametrize(
    "fields, headers",
    [({"timeout": 1.5}, {}), ({}, {"x-request-timeout": "1.5"}), ({"ttft_timeout": 0.5}, {})],
)
async def test_a_deadline_is_504_and_ends_all_inputs(
    fields: dict[str, Any], headers: dict[str, str], autojump_clock: Any
) -> None:
    async with served(step_seconds=1, max_num_seqs=2) as server:
        status, response = await ask(server, {"input": ["a"] * 10, **fields}, **headers)
        assert status == 504
        assert response["error"]["code"] == ("ttft_timeout" if "ttft_timeout" in fields else "timeout")


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("encoder", [None, "embed"])
@pytest.mark.parametrize("steps_before", [0, 1, 4])
async def test_a_client_that_leaves_cancels_all_inputs(
    http: int, encoder: Any, steps_before: int, autojump_clock: Any
) -> None:
    async with served(encoder=encoder, max_num_seqs=4, paused=True) as server:
        engine = server.engine
        free_before = engine.stats().blocks_free
        async with server.client(http=http).ask(PATH, {"input": ["some text"] * 18}):
            await wait_all_tasks_blocked()
            await engine.step(steps_before)
            assert engine.stats().running_count + engine.stats().waiting_count == 2
        await wait_all_tasks_blocked()
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == free_before
        engine.assert_all_free()
        engine.resume()


async def test_a_client_that_leaves_during_a_step_abandons_the_step(autojump_clock: Any) -> None:
    async with served(max_num_seqs=4, paused=True) as server:
        client = server.client()
        with trio.CancelScope() as scope:
            async with client.ask(PATH, {"input": ["some text"] * 18}):
                async with server.engine.held_step() as plan:
                    client.close()
                    await wait_all_tasks_blocked()
                    assert server.engine.core.flights.is_abandoned(plan)
                scope.cancel()
        server.engine.resume()


async def test_a_pooling_request_is_listed_and_aborted_by_its_id(autojump_clock: Any) -> None:
    async with served(max_num_seqs=4, paused=True) as server:
        async with server.client().ask(PATH, {"input": ["text"] * 10}, headers={"x-request-id": "mine"}) as response:
            await wait_all_tasks_blocked()
            (view,) = server.engine.live_requests()
            assert (view.id, view.prompt_token_count) == ("mine", 40)
            server.engine.abort("mine")
            assert await response.head() == 503
            assert (await response.json())["error"]["code"] == "request_aborted"
        server.engine.resume()
