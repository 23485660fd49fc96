"""Tests files and batches with OpenAI's own client, unmodified, and the real model; also after a kill of the server."""

from __future__ import annotations

import io
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

LINES = 14
pytestmark = pytest.mark.slow


@contextmanager
def client_of(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def lines_of(count: int, **fields: object) -> bytes:
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 12, **fields}
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**body, "messages": [{"role": "user", "content": f"What is {index} plus one?"}]},
        }
        for index in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def start_batch(client: openai.OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("lines.jsonl", io.BytesIO(content)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a test"}
    )


def wait_for(client: openai.OpenAI, batch_id: str, condition) -> openai.types.Batch:
    for _ in range(1200):
        batch = client.batches.retrieve(batch_id)
        if condition(batch):
            return batch
        time.sleep(0.05)
    raise AssertionError(batch)


def test_batch_runs_from_uploaded_file_to_downloaded_results(server):
    with client_of(server) as client:
        batch = start_batch(client, lines_of(5))
        batch = wait_for(client, batch.id, lambda batch: batch.status == "completed")
        assert batch.metadata == {"of": "a test"}
        assert batch.usage is not None
        assert batch.usage.output_tokens > 0
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert {result["custom_id"] for result in results} == {f"line-{index}" for index in range(5)}
        assert all(result["response"]["body"]["choices"][0]["message"]["content"] for result in results)
        assert batch.id in [one.id for one in client.batches.list(limit=3)]
        assert batch.output_file_id in [file.id for file in client.files.list(purpose="batch_output")]
        assert client.files.retrieve(batch.input_file_id).filename == "lines.jsonl"
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_of_nobody")


def test_cancelled_batch_leaves_no_used_blocks(server):
    with client_of(server) as client:
        batch = start_batch(client, lines_of(30, max_tokens=2000))
        wait_for(client, batch.id, lambda batch: batch.status == "in_progress")
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        wait_for(client, batch.id, lambda batch: batch.status == "cancelled")
        for _ in range(100):
            if server.metric('trioserve:kv_blocks{state="used"}') == 0:
                break
        assert server.metric('trioserve:kv_blocks{state="used"}') == 0


def test_restarted_server_completes_its_batch_with_one_result_per_line(start_server, tmp_path):
    flags = ("--max-num-seqs", "8", "--data-dir", str(tmp_path))
    first = start_server(*flags)
    with client_of(first) as client:
        batch = start_batch(client, lines_of(LINES))
        done = wait_for(client, batch.id, lambda batch: batch.request_counts.completed >= 3)
    first.stop(signal.SIGKILL)
    assert done.request_counts.completed < LINES
    with client_of(start_server(*flags)) as client:
        seen = client.batches.retrieve(batch.id)
        assert seen.request_counts.completed >= done.request_counts.completed
        batch = wait_for(client, batch.id, lambda batch: batch.status == "completed")
        assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(result["custom_id"] for result in results) == sorted(f"line-{index}" for index in range(LINES))
