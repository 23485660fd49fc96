"""Tests replicas of Ray Serve with the real model: streams, clients that disconnect, and replicas that end."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import openai
import pytest

from .conftest import Cluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGS = {"model": "smollm2", "max_num_seqs": "8", "served_model_name": "small"}
QUESTION = [{"role": "user", "content": "Name a river in Africa."}]


@pytest.fixture(scope="module")
def llm(cluster: Cluster) -> Iterator[Cluster]:
    assert cluster.order(run="llm", args=ARGS) == {"error": None}
    yield cluster
    cluster.order(delete="llm")


@contextmanager
def started_stream(cluster: Cluster, name: str, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """Start a stream and read its first event. At the end, the client disconnects."""
    with closing(http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)) as connection:
        body = {"model": "small", "prompt": "Once upon a time", "stream": True, "ignore_eos": True, **fields}
        connection.request("POST", f"/{name}/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield response


def load(cluster: Cluster, name: str) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)) as connection:
        connection.request("GET", f"/{name}/load")
        return dict(json.loads(connection.getresponse().read()))


def test_chat_has_the_same_text_streamed_and_unstreamed(llm: Cluster):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{llm.port}/llm/v1", api_key="-", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["small"]
        asked: dict[str, Any] = {"model": "small", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(stream=True, **asked))
        assert len(chunks) > 6
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(**{**asked, "max_tokens": -1})


def test_blocks_of_a_stream_are_freed_when_its_client_disconnects(llm: Cluster):
    assert load(llm, "llm")["kv_usage"] == 0
    with started_stream(llm, "llm", max_tokens=4000):
        wait_until(lambda: load(llm, "llm")["running"] == 1, "for the request to run")
        assert load(llm, "llm")["kv_usage"] > 0
    wait_until(lambda: load(llm, "llm")["running"] == 0, "for the request to end")
    assert load(llm, "llm")["kv_usage"] == 0


def test_killed_replica_is_replaced(llm: Cluster):
    (before,) = llm.replicas("llm")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: llm.replicas("llm") not in ([before], []), "for another replica")

    def answers() -> bool:
        try:
            return load(llm, "llm")["running"] == 0
        except (ValueError, http.client.HTTPException):  # Without a replica, Ray Serve responds with plain text.
            return False

    wait_until(answers, "for it to answer")


def test_deleted_replica_completes_its_streams_and_leaves_no_process(cluster: Cluster):
    assert cluster.order(run="going", args=ARGS) == {"error": None}
    assert len(cluster.replicas("going")) == 1
    with started_stream(cluster, "going", max_tokens=300) as response:
        assert cluster.order(delete="going") == {"error": None}
        assert response.read().rstrip().endswith(b"data: [DONE]")
    wait_until(lambda: not cluster.replicas("going"), "for its process to end")


def test_serve_status_names_a_missing_model(cluster: Cluster):
    error = cluster.order(run="bad", args={"model": "/no/such/model"})["error"]
    assert "ModelLoadError: the model '/no/such/model' is not found; name a directory" in error
    cluster.order(delete="bad")
    wait_until(lambda: not cluster.replicas("bad"), "for its process to end")
