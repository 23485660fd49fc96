"""Tests the server with Ollama's own client, unmodified, and the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import ollama
import pytest

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"temperature": 0, "num_predict": 20}


@pytest.fixture
def client(server) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    with client._client:
        yield client


def test_streamed_chat_has_the_same_text_as_an_unstreamed_one(client):
    whole = client.chat("smollm2", ASK, options=GREEDY)
    assert "Paris" in whole.message.content
    assert whole.done_reason == "stop"
    assert whole.prompt_eval_count > 10
    assert whole.total_duration >= whole.eval_duration > 0
    pieces = list(client.chat("smollm2:latest", ASK, options=GREEDY, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert pieces[-1].eval_count == whole.eval_count


def test_generate_accepts_a_prompt_and_raw_text(client):
    assert "Paris" in client.generate("smollm2", ASK[0]["content"], options=GREEDY).response
    raw = client.generate("smollm2", "The capital of France is", raw=True, options={**GREEDY, "num_predict": 5})
    assert "Paris" in raw.response
    assert raw.done_reason == "length"


def test_chat_follows_the_schema(client):
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    said = client.chat("smollm2", ASK, format=schema, options=GREEDY).message.content
    assert json.loads(said) in ({"city": "Paris"}, {"city": "Rome"})


def test_served_model_is_listed_and_described(client, server):
    [model] = client.list().models
    assert (model.model, model.details.family) == ("smollm2:latest", "llama")
    assert model.size > 1_000_000
    shown = client.show("smollm2")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "completion" in shown.capabilities
    assert httpx.head(server.url).status_code == httpx.get(server.url).status_code == 200


def test_closing_a_stream_of_ollamas_client_frees_its_blocks(client, server):
    stream = client.chat("smollm2", ASK, options={"num_predict": 2000}, stream=True)
    next(stream)
    stream.close()
    for _ in range(200):
        if server.metric('trioserve:kv_blocks{state="used"}') == 0:
            break
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0
