"""Tests the server with Anthropic's official client, unmodified, and the real model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import anthropic
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"temperature": 0}  # Temperature is passed as `extra_body`, because the client has no argument for it.
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_message_has_text_stop_reason_and_usage(client):
    message = client.messages.create(model="smollm2", max_tokens=20, messages=MESSAGES, extra_body=GREEDY)
    assert message.type == "message"
    assert "Paris" in message.content[0].text
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 10
    assert message._request_id


def test_stream_helper_returns_the_same_message_as_an_unstreamed_request(client):
    whole = client.messages.create(model="smollm2", max_tokens=20, messages=MESSAGES, extra_body=GREEDY)
    with client.messages.stream(model="smollm2", max_tokens=20, messages=MESSAGES, extra_body=GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_client_reads_a_resumable_stream_whose_events_have_ids(client):
    asked = {"model": "smollm2", "max_tokens": 20, "messages": MESSAGES, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked, extra_headers={"x-trioserve-resumable": "1"}) as stream:
        final = stream.get_final_message()
        assert "x-trioserve-resume" in stream.response.headers
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


def test_raw_event_stream_with_system_prompt_and_stop_sequence_ends_with_message_stop(client):
    types = [
        event.type
        for event in client.messages.create(
            model="smollm2",
            max_tokens=20,
            messages=[*MESSAGES, {"role": "assistant", "content": "The capital of France"}],
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["Paris"],
            extra_body=GREEDY,
            stream=True,
        )
    ]
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]


def test_count_tokens_equals_the_usage_of_the_message(client):
    counted = client.messages.count_tokens(model="smollm2", messages=MESSAGES, system="Be brief.")
    message = client.messages.create(model="smollm2", max_tokens=1, messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_conversation_with_a_tool_result_gets_a_response(client):
    message = client.messages.create(
        model="smollm2",
        max_tokens=20,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny, 25 degrees."}],
            },
        ],
    )
    assert message.content


@pytest.mark.parametrize(
    ("arguments", "error", "kind"),
    [
        ({"model": "claude-of-tomorrow"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_errors_raise_exception_types_of_the_client(client, arguments, error, kind):
    with pytest.raises(error) as caught:
        client.messages.create(
            **{"model": "smollm2", "messages": MESSAGES, "max_tokens": 3, **arguments}  # type: ignore[arg-type]
        )
    assert caught.value.type == kind
    assert caught.value.request_id


def test_closing_a_stream_of_anthropics_client_frees_its_blocks(client, server):
    with client.messages.stream(model="smollm2", max_tokens=2000, messages=MESSAGES) as stream:
        next(iter(stream.text_stream))
    for _ in range(200):
        if server.metric('trioserve:kv_blocks{state="used"}') == 0:
            break
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0


@pytest.mark.slow
def test_message_batch_completes_is_listed_and_deleted(client):
    requests = [
        {
            "custom_id": f"line-{index}",
            "params": {"model": "smollm2", "max_tokens": 8, "messages": MESSAGES, "temperature": 0},
        }
        for index in range(3)
    ]
    batch = client.messages.batches.create(requests=requests)
    assert batch.request_counts.processing == 3
    for _ in range(1200):
        batch = client.messages.batches.retrieve(batch.id)
        if batch.processing_status == "ended":
            break
        time.sleep(0.05)
    assert batch.request_counts.succeeded == 3
    results = {result.custom_id: result.result for result in client.messages.batches.results(batch.id)}
    assert set(results) == {"line-0", "line-1", "line-2"}
    assert all("Paris" in result.message.content[0].text for result in results.values())
    assert batch.id in [one.id for one in client.messages.batches.list(limit=5)]
    assert client.messages.batches.cancel(batch.id).processing_status == "ended"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_official_client_lists_the_models(client):
    assert [(model.id, model.type) for model in client.models.list()] == [("smollm2", "model")]
    assert client.models.retrieve("smollm2").display_name == "smollm2"
