"""Tests the Responses API with OpenAI's own client and the real model, also after a kill of the server."""

from __future__ import annotations

import itertools
import signal

import httpx
import openai
import pytest

QUESTION = "What is the capital of France? Answer in one word."


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.slow
def test_response_is_created_streamed_continued_retrieved_and_deleted(server):
    with client_of(server) as client:
        first = client.responses.create(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=20)
        assert "Paris" in first.output_text
        with client.responses.stream(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=20) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert text == first.output_text == stream.get_final_response().output_text
        second = client.responses.create(
            model="smollm2", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=20
        )
        assert second.usage.input_tokens > first.usage.total_tokens
        assert client.responses.retrieve(second.id) == second
        [item] = client.responses.input_items.list(second.id).data
        assert item.content[0].text == "And of Italy?"
        count = client.responses.input_tokens.count(model="smollm2", input=QUESTION)
        assert count.input_tokens == first.usage.input_tokens
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


@pytest.mark.slow
def test_background_response_is_read_from_a_sequence_number_and_cancelled(server):
    with client_of(server) as client:
        fields = {"model": "smollm2", "input": "Count to a million.", "background": True}
        fields |= {"extra_body": {"ignore_eos": True}, "max_output_tokens": 1500}
        with client.responses.create(**fields, stream=True) as events:
            response_id = next(iter(events)).response.id
            assert [event.sequence_number for event in itertools.islice(events, 5)] == [1, 2, 3, 4, 5]
        assert client.responses.retrieve(response_id).status == "in_progress"
        with client.responses.retrieve(response_id, stream=True, starting_after=5) as events:
            assert next(iter(events)).sequence_number == 6
        cancelled = client.responses.cancel(response_id)
        assert cancelled.status == "cancelled"
        assert client.responses.retrieve(response_id).status == "cancelled"
        load = httpx.get(f"{server.url}/load").json()
        assert (load["running"], load["waiting"]) == (0, 0)


@pytest.mark.slow
def test_completed_responses_survive_a_kill_and_unfinished_ones_become_failed(start_server, tmp_path):
    server = start_server("--data-dir", str(tmp_path))
    with client_of(server) as client:
        kept = client.responses.create(model="smollm2", input=QUESTION, max_output_tokens=5)
        fields = {"model": "smollm2", "input": "Count.", "background": True, "extra_body": {"ignore_eos": True}}
        lost = client.responses.create(**fields, max_output_tokens=1500)
    server.stop(signal.SIGKILL)
    with client_of(start_server("--data-dir", str(tmp_path))) as client:
        assert client.responses.retrieve(kept.id) == kept
        response = client.responses.retrieve(lost.id)
        assert response.status == "failed"
        assert "the server stopped" in response.error.message
        client.responses.create(model="smollm2", input="Go on.", previous_response_id=kept.id, max_output_tokens=2)


@pytest.mark.slow
def test_lost_connection_is_replaced_and_the_stream_continues_without_gaps(start_server):
    server = start_server("--detach-timeout-max", "60")
    headers = {"x-session-id": "chat-1", "x-detach-timeout": "30"}
    body = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 60, "stream": True, "seed": 1, "ignore_eos": True}
    seen: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as response:
        for line in response.iter_lines():
            seen.append(line)
            if line.startswith("data:") and len(seen) > 12:
                break
    last = max(int(line.removeprefix("id: ")) for line in seen if line.startswith("id: "))
    with httpx.stream("GET", f"{server.url}/v1/streams/chat-1?after={last}") as response:
        seen += response.iter_lines()
    numbers = [int(line.removeprefix("id: ")) for line in seen if line.startswith("id: ")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [line for line in seen if line.startswith("data:")][-1] == "data: [DONE]"
