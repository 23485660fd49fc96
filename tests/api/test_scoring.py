"""Tests /v1/rerank and /v1/score with models that score pairs and models that compute vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.pooling import Pooling
from trioserve.testing import MemoryServer, open_memory_server
from trioserve.testing.fake_executor import FakeModel

DOCUMENTS = ["one", "two", "three", "four"]
SCORE = Pooling(task="score", method="mean", normalize=True)


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[MemoryServer]:
    async with open_memory_server(**options) as server:
        yield server
        await trio.sleep(1)
        await server.assert_all_free()


async def ask(server: MemoryServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with server.client().ask(path, body) as response:
        return await response.head(), await response.json()


def vector(text: str) -> list[float]:
    model = FakeModel(vocab_size=256)
    digest = model.digest(list(text.encode()))
    return model.pooled(Pooling(task="embed", method="last", normalize=True), digest).values()


def cosine(left: str, right: str) -> float:
    return sum(a * b for a, b in zip(vector(left), vector(right), strict=True))


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_best_first(path: str, autojump_clock: Any) -> None:
    async with served() as server:
        body = {"query": "which", "documents": [DOCUMENTS[0], {"text": "two"}, *DOCUMENTS[2:]], "model": "fake"}
        status, response = await ask(server, path, body)
        assert status == 200
        scores = [cosine("which", document) for document in DOCUMENTS]
        order = sorted(range(4), key=lambda index: -scores[index])
        assert [result["index"] for result in response["results"]] == order
        assert [result["document"] for result in response["results"]] == [{"text": DOCUMENTS[i]} for i in order]
        assert [result["relevance_score"] for result in response["results"]] == pytest.approx(
            [scores[index] for index in order], abs=1e-6
        )
        assert response["usage"]["prompt_tokens"] == len("which" + "".join(DOCUMENTS))
        _, best = await ask(server, path, {**body, "top_n": 2, "return_documents": False})
        assert [result["index"] for result in best["results"]] == order[:2]
        assert all("document" not in result for result in best["results"])


async def test_a_model_with_a_scoring_head_scores_each_pair(autojump_clock: Any) -> None:
    async with served(encoder="score") as server:
        status, response = await ask(server, "/v1/rerank", {"query": "which", "documents": DOCUMENTS})
        assert status == 200
        assert len(response["results"]) == 4
        assert all(0 <= result["relevance_score"] <= 1 for result in response["results"])
        status, response = await ask(server, "/v1/embeddings", {"input": "a"})
        assert status == 400
        assert "scores pairs of texts and computes no embeddings" in response["error"]["message"]


async def test_pooling_returns_vectors_of_texts_or_tokens(autojump_clock: Any) -> None:
    async with served(encoder="embed") as server:
        status, whole = await ask(server, "/pooling", {"input": ["one", "two"]})
        assert status == 200
        _, tokens = await ask(server, "/pooling", {"input": ["one", "two"], "task": "token_embed"})
        _, embeddings = await ask(server, "/v1/embeddings", {"input": ["one", "two"]})
        vectors = [entry["embedding"] for entry in embeddings["data"]]
        assert [entry["data"] for entry in whole["data"]] == vectors
        assert [entry["data"] for entry in tokens["data"]] == [[vector] for vector in vectors]
        assert (whole["object"], whole["data"][1]["object"], whole["data"][1]["index"]) == ("list", "pooling", 1)
        _, encoded = await ask(server, "/pooling", {"input": "one", "encoding_format": "base64"})
        assert isinstance(encoded["data"][0]["data"], str)
        status, refused = await ask(server, "/pooling", {"input": "one", "task": "token_classify"})
        assert (status, refused["error"]["param"]) == (400, "task")
    async with served() as server:
        status, refused = await ask(server, "/pooling", {"input": "one", "task": "token_embed"})
        assert status == 400
        assert "only encoders compute a result for each token" in refused["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    "left, right, pairs",
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        (["a"], ["c", "d"], [("a", "c"), ("a", "d")]),
    ],
)
async def test_one_text_is_compared_with_all_texts_or_each_text_with_its_partner(
    path: str, names: tuple[str, str], left: Any, right: Any, pairs: list[tuple[str, str]], autojump_clock: Any
) -> None:
    async with served() as server:
        status, response = await ask(server, path, {names[0]: left, names[1]: right})
        assert status == 200, response
        assert [entry["index"] for entry in response["data"]] == list(range(len(pairs)))
        assert [entry["score"] for entry in response["data"]] == pytest.approx(
            [cosine(*pair) for pair in pairs], abs=1e-6
        )


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", 5]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"txt": "b"}]}, None),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "x" * 200]}, "documents[1]"),
        ("/v1/rerank", {"query": "x" * 200, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"queries": "a"}, "documents"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "priority": -101}, "priority"),
    ],
)
async def test_invalid_field_of_a_scoring_request_is_refused_with_its_path(
    path: str, body: dict[str, Any], param: str | None, autojump_clock: Any
) -> None:
    async with served(max_model_len=128) as server:
        status, response = await ask(server, path, body)
        assert status == 400, response
        if param is not None:
            assert response["error"]["param"] == param


@pytest.mark.parametrize("encoder", [None, "score"])
async def test_a_client_that_leaves_cancels_all_documents(encoder: Any, autojump_clock: Any) -> None:
    async with served(encoder=encoder, max_num_seqs=4, paused=True) as server:
        async with server.client().ask("/v1/rerank", {"query": "which", "documents": DOCUMENTS}):
            await wait_all_tasks_blocked()
            await server.engine.step()
        await server.assert_all_free()
        server.engine.resume()
