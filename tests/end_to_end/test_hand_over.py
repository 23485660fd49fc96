"""Tests that a server hands over a stream to another server, which loads its KV and continues.

The processes and the model are real.
"""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Callable, Iterator

import pytest

FLAGS = (
    *("--dtype", "float32", "--quantization", "none", "--kv-cache-memory", "0.25"),
    *("--kv-transfer-config", '{"kv_connector": "tcp", "kv_role": "kv_both"}'),
)
BODY = {
    "prompt": "Tell me a long story about the sea. " * 12,
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 5,
    "stream": True,
}


class Stream:
    """Reads one streamed response.

    Args:
        url: base URL of the server.
        body: body of the request.

    Attributes:
        head: resume state from the response head.
        text, token_ids: text and tokens received so far.
        given: kv_transfer_params of the hand-over event, or None if the stream was not handed over.
    """

    def __init__(self, url: str, body: dict[str, object]) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        headers = {"x-request-id": "moved", "x-trioserve-resumable": "1"}
        self.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.head = json.loads(self.response.headers["x-trioserve-resume"])
        self.text = ""
        self.token_ids: list[int] = []
        self.given: dict[str, object] | None = None

    def groups(self) -> Iterator[None]:
        """Read the stream, and yield after each group of events, which ends with an `id` line."""
        for raw in self.response:
            line = raw.decode().strip()
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if event["object"] == "hand_over":
                    self.given = event["kv_transfer_params"]
                else:
                    self.text += "".join(choice["text"] for choice in event["choices"])
            elif line.startswith("id: 0:"):
                self.token_ids += [int(token_id) for token_id in line[6:].rstrip("!").split(",") if token_id]
                yield

    def read(self) -> Stream:
        for _ in self.groups():
            pass
        self.close()
        return self

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@pytest.mark.slow
def test_handed_over_stream_resumes_with_its_kv_on_another_server(start_server: Callable[..., object]):
    first, second = (start_server(*FLAGS) for _ in range(2))
    whole = Stream(second.url, {**BODY, "cache_salt": "another"}).read()
    begun = Stream(first.url, BODY)
    for number, _ in enumerate(begun.groups()):
        if number == 10:
            connection = http.client.HTTPConnection(first.url.removeprefix("http://"), timeout=60)
            connection.request("POST", "/v1/requests/moved/hand-over")
            with connection.getresponse() as response:
                assert response.status == 200
            connection.close()
    begun.close()
    assert begun.given is not None
    assert first.metric("trioserve:kv_transfer_requests_held") == 1
    resume = {**begun.head, "token_ids": [begun.token_ids], "finished": [False]}
    rest = Stream(second.url, {**BODY, "resume": resume, "kv_transfer_params": begun.given}).read()
    assert begun.text + rest.text == whole.text
    assert [*begun.token_ids, *rest.token_ids] == whole.token_ids
    assert second.metric("trioserve:kv_transfer_loads_completed_total") == 1
    assert second.metric("trioserve:kv_transfer_loaded_tokens_total") > 100
    assert first.metric('trioserve:kv_blocks{state="used"}') == 0
    assert second.metric('trioserve:kv_blocks{state="used"}') == 0


@pytest.mark.slow
def test_stopped_server_hands_over_its_streams_at_the_drain_deadline(start_server: Callable[..., object]):
    """The test does not check that KV is loaded: the server holds it for two seconds, too short for a busy machine."""
    first, second = start_server(*FLAGS, "--drain-timeout", "0"), start_server(*FLAGS)
    whole = Stream(second.url, {**BODY, "cache_salt": "another"}).read()
    begun = Stream(first.url, BODY)
    for number, _ in enumerate(begun.groups()):
        if number == 10:
            first.process.send_signal(signal.SIGTERM)
    begun.close()
    assert begun.given is not None
    assert begun.given["do_remote_prefill"]
    resume = {**begun.head, "token_ids": [begun.token_ids], "finished": [False]}
    rest = Stream(second.url, {**BODY, "resume": resume, "kv_transfer_params": begun.given}).read()
    assert begun.text + rest.text == whole.text
    assert first.stop() == 0
    assert second.metric('trioserve:kv_blocks{state="used"}') == 0
