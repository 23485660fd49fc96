"""Tests with the real model that responses follow their schema.

The tests use openai-python with a server, and engines with draft tokens, overlapped steps and preemption.
"""

from __future__ import annotations

import json

import openai
import pytest
import trio

import trioserve
from trioserve import FinishReason, SamplingParams, StructuredOutput

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"enum": ["python", "rust", "cooking"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Make up a person."}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "skills"]
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 120
    assert set(person["skills"]) <= {"python", "rust", "cooking"}
    assert 1 <= len(person["skills"]) <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_is_json_that_the_schema_accepts(client, server, stream):
    asked = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 80, "n": 3, "seed": 1, "temperature": 1.0}
    response = client.chat.completions.create(**asked, response_format=FORMAT, logprobs=True, stream=stream)
    texts = {}
    if stream:
        for chunk in response:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    else:
        for choice in response.choices:
            assert choice.finish_reason == "stop"
            assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
            texts[choice.index] = choice.message.content
    assert len(texts) == 3
    for text in texts.values():
        check_person(text)
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0


def test_forced_tokens_are_counted_and_a_client_that_leaves_frees_its_blocks(client, server):
    forced = server.metric("trioserve:forced_tokens_total")
    asked = {"model": "smollm2", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 80}
    check_person(client.chat.completions.create(**asked).choices[0].message.content)
    assert server.metric("trioserve:forced_tokens_total") >= forced + 5
    long = {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 100}
    wanted = {"type": "json_schema", "json_schema": {"name": "long", "schema": long}}
    with client.chat.completions.create(
        **asked | {"response_format": wanted, "max_tokens": 4000}, stream=True
    ) as stream:
        assert next(iter(stream))
    for _ in range(100):
        if server.metric("trioserve:num_requests_running") == 0:
            break
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0


ENGINES = {
    "drafts": {"speculative_ngram": 6},
    "overlap": {"overlap_steps": True},
    "preemption": {"kv_cache_memory": 0.002, "max_model_len": 64},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES.keys())
async def test_schema_is_followed_with_drafts_overlapped_steps_and_preemption(options):
    async with trioserve.open_engine("smollm2", **{"kv_cache_memory": 0.1, **options}) as engine:

        async def ask(seed):
            sampling = SamplingParams(seed=seed, max_tokens=48, structured=StructuredOutput.json(SCHEMA))
            async with engine.generate("A person: ", sampling) as stream:
                deltas = [delta async for delta in stream]
            assert deltas[-1].finish_reason is FinishReason.STOP, deltas[-1]
            check_person("".join(delta.text for delta in deltas))

        async with trio.open_nursery() as nursery:
            for seed in range(4):
                nursery.start_soon(ask, seed)
        assert engine.stats().blocks_used == 0
        if "max_model_len" in options:
            assert engine.stats().preemptions_total > 0
