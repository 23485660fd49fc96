"""Tests the server with OpenAI's official client, unmodified, and the real model, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def client(request: pytest.FixtureRequest, server) -> Iterator[openai.OpenAI]:
    is_http2 = request.param == "HTTP/2"
    with (
        openai.DefaultHttpxClient(http1=not is_http2, http2=is_http2) as http_client,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http_client, max_retries=0) as client,
    ):
        assert client.models.with_raw_response.list().http_response.http_version == request.param
        yield client


def test_official_client_lists_the_models(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"


def test_chat_completion_has_text_finish_reason_and_usage(client):
    response = client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=0, max_tokens=20)
    assert "Paris" in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


@pytest.mark.slow
def test_streamed_chat_has_the_same_text_and_usage_as_an_unstreamed_one(client):
    whole = client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=0, max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_helper_returns_deltas_and_the_final_completion(client):
    with client.chat.completions.stream(model="smollm2", messages=MESSAGES, temperature=0, max_tokens=20) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert "Paris" in final.choices[0].message.content


def test_completion_with_many_options_has_echo_choices_and_logprobs(client):
    response = client.completions.create(
        model="smollm2",
        prompt=["One, two, three,", "The sun rises in the"],
        n=2,
        echo=True,
        logprobs=3,
        max_tokens=8,
        temperature=0.8,
        top_p=0.9,
        seed=7,
        stop=["\n\n\n"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"100": -5},
    )
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.choices[0].text.startswith("One, two, three,")
    assert response.choices[2].text.startswith("The sun rises in the")
    logprobs = response.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)


def test_streamed_completion_returns_all_choices(client):
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in client.completions.create(
        model="smollm2", prompt="Once upon a time", n=2, max_tokens=12, seed=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert all(texts.values())
    assert set(reasons.values()) <= {"length", "stop"}


@pytest.mark.slow
def test_same_seed_returns_the_same_text(client):
    def ask() -> str:
        response = client.completions.create(
            model="smollm2", prompt="Once upon a", max_tokens=16, seed=42, temperature=1
        )
        return response.choices[0].text

    assert ask() == ask()


def test_chat_logprobs_equal_their_top_entries(client):
    response = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    for entry in response.choices[0].logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


@pytest.mark.parametrize(
    ("arguments", "error", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, None),
        ({"max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"messages": []}, openai.BadRequestError, None),
    ],
)
def test_errors_raise_exception_types_of_the_client(client, arguments, error, code):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "smollm2", "messages": MESSAGES, "max_tokens": 3, **arguments})
    assert caught.value.code == code
    assert caught.value.message


def test_response_has_the_request_id_of_the_client(client):
    raw = client.models.with_raw_response.list(extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"


def test_closing_a_stream_of_openais_client_frees_its_blocks(client, server):
    stream = client.completions.create(
        model="smollm2",
        prompt="Tell me everything",
        max_tokens=2000,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    for index, _ in enumerate(stream):
        if index == 3:
            break
    aborts_before = server.metric('trioserve:aborts_total{phase="decode"}')
    assert server.metric('trioserve:kv_blocks{state="used"}') > 0
    stream.close()
    if client.models.with_raw_response.list().http_response.http_version == "HTTP/2":
        # This client does not reset a stream that it abandons. The stream ends when the connection closes.
        client.close()
    for _ in range(200):
        if server.metric('trioserve:kv_blocks{state="used"}') == 0:
            break
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0
    assert server.metric('trioserve:aborts_total{phase="decode"}') == aborts_before + 1


def test_embeddings_have_unit_length_and_agree_in_base64_and_float(client):
    """By default, the client requests base64 and decodes it."""
    texts = ["The weather is fine today.", "It is sunny outside.", "def add(a, b): return a + b"]
    response = client.embeddings.create(model="smollm2", input=texts)
    assert [entry.index for entry in response.data] == [0, 1, 2]
    vectors = [entry.embedding for entry in response.data]
    assert {len(vector) for vector in vectors} == {576}
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-5 for vector in vectors)
    plain = client.embeddings.create(model="smollm2", input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-2)  # Rounding differs with the batch.
    assert response.usage.prompt_tokens == response.usage.total_tokens > 10


def test_error_names_the_input_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.embeddings.create(model="smollm2", input=["short", "long " * 9000])
    assert caught.value.param == "input[1]"
