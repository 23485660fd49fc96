"""Tests deadlines, running requests and keep-alive comments as clients see them, with the whole server in memory."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.testing.invariants import check_idle
from trioserve.testing.memory_server import MemoryServer, open_memory_server


class Response:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines[1:]}

    @property
    def json(self):
        return json.loads(self.body)


class RemoteRequest:
    """One HTTP/1.1 request whose response ends with the connection."""

    def __init__(self, server: MemoryServer) -> None:
        self.stream = server.connect()
        self.raw = b""

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> Response:
        data = b"" if body is None else json.dumps(body).encode()
        fields = {"host": "test", "connection": "close", "content-length": str(len(data)), **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
        await self.stream.send_all(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        async for piece in self.stream:
            self.raw += piece
        return Response(self.raw)


def completion(prompt: str = "prompt", **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True, **more}


async def ask(server: MemoryServer, method: str, path: str, body: object = None, **headers: str) -> Response:
    return await RemoteRequest(server).ask(method, path, body, **headers)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "headers", "reason", "seconds"),
    [
        ({"queue_timeout": 2}, {}, "queue_timeout", 2),
        ({}, {"x_queue_timeout": "1.5"}, "queue_timeout", 1.5),
        ({}, {"x_ttft_timeout": "2"}, "ttft_timeout", 2),
        ({}, {"x_request_timeout": "3"}, "timeout", 3),
        ({"timeout": 1}, {"x_request_timeout": "3"}, "timeout", 1),
    ],
)
async def test_deadline_in_the_queue_gives_status_504(stream, fields, headers, reason, seconds, autojump_clock):
    """Scenario S35 of tests/README.md: the time in the queue is bounded."""
    async with (
        open_memory_server(step_seconds=0.1, max_num_seqs=1) as server,
        server.engine.generate("in the way") as _,
    ):
        await trio.sleep(0.25)
        started_at = trio.current_time()
        response = await ask(server, "POST", "/v1/completions", completion(stream=stream, **fields), **headers)
        assert trio.current_time() - started_at == pytest.approx(seconds, abs=0.01)
        assert response.status == 504
        assert response.headers["x-trioserve-reason"] == response.json["error"]["code"] == reason
        assert int(response.headers["retry-after"]) > 0


async def test_a_deadline_during_a_stream_is_an_error_event_without_a_clean_end(autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        response = await ask(server, "POST", "/v1/completions", completion(stream=True, timeout=1.05))
        assert response.status == 200
        events = [line for line in response.body.split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "timeout"
        assert b"[DONE]" not in response.body
        assert len(events) > 8
        await trio.sleep(0.2)
        check_idle(server.engine.core)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"timeout": -1}, {}, "timeout"),
        ({"queue_timeout": "x"}, {}, "queue_timeout"),
        ({}, {"x_ttft_timeout": "soon"}, "X-TTFT-Timeout"),
    ],
)
async def test_invalid_deadline_is_refused_with_400_and_the_field(fields, headers, param, autojump_clock):
    async with open_memory_server() as server:
        response = await ask(server, "POST", "/v1/completions", completion(**fields), **headers)
        assert response.status == 400
        assert response.json["error"]["param"] == param


async def test_a_request_is_listed_and_aborted_by_id_and_its_client_gets_an_error_event(autojump_clock):
    """Scenario S25 of tests/README.md: a request can be aborted by the id in the head of its response."""
    async with open_memory_server(step_seconds=0.1) as server, trio.open_nursery() as nursery:
        client = RemoteRequest(server)
        nursery.start_soon(
            lambda: client.ask("POST", "/v1/completions", completion(stream=True), **{"x-request-id": "r/1"})
        )
        await trio.sleep(0.45)
        listed = (await ask(server, "GET", "/v1/requests")).json["data"]
        assert [(one["id"], one["state"], one["phase"]) for one in listed] == [("r/1", "running", "decode")]
        assert listed[0]["blocks"] > 0
        assert listed[0]["prompt_tokens"] == 6

        assert (await ask(server, "DELETE", "/v1/requests/r/2")).status == 404
        response = await ask(server, "DELETE", "/v1/requests/r%2F1")
        assert (response.status, response.json["result"]) == (200, "aborted")
        await wait_all_tasks_blocked()
        last = [line for line in client.raw.split(b"\n") if line.startswith(b"data: ")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "request_aborted"
        await trio.sleep(0.2)
        check_idle(server.engine.core)
        response = await ask(server, "POST", "/v1/requests/abort", {"ids": ["r/1", "never", "r/1"]})
        assert [(one["id"], one["result"]) for one in response.json["data"]] == [
            ("r/1", "already_finished"),
            ("never", "unknown"),
        ]


async def test_a_key_sees_and_aborts_its_own_requests_and_the_admin_all_requests(autojump_clock):
    async with (
        open_memory_server(step_seconds=0.1, api_keys=("one", "two"), admin_api_key="boss") as server,
        trio.open_nursery() as nursery,
    ):

        def as_key(key: str, method: str, path: str, body: object = None, request_id: str = "x"):
            headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
            return RemoteRequest(server).ask(method, path, body, **headers)

        nursery.start_soon(lambda: as_key("one", "POST", "/v1/completions", completion(), "of-one"))
        nursery.start_soon(lambda: as_key("two", "POST", "/v1/completions", completion(), "of-two"))
        await trio.sleep(0.35)

        async def seen_by(key: str) -> set[str]:
            return {one["id"] for one in (await as_key(key, "GET", "/v1/requests")).json["data"]}

        assert await seen_by("one") == {"of-one"}
        assert await seen_by("two") == {"of-two"}
        assert await seen_by("boss") == {"of-one", "of-two"}
        assert (await ask(server, "GET", "/v1/requests")).status == 401
        assert (await as_key("one", "DELETE", "/v1/requests/of-two")).status == 404
        assert server.engine.core.stats().running_count == 2
        assert (await as_key("two", "DELETE", "/v1/requests/of-two")).json["result"] == "aborted"
        assert (await as_key("boss", "DELETE", "/v1/requests/of-one")).json["result"] == "aborted"


async def test_keep_alive_comments_are_sent_during_a_long_prefill(autojump_clock):
    async with open_memory_server(step_seconds=10, max_num_batched_tokens=8) as server:
        response = await ask(server, "POST", "/v1/completions", completion("p" * 40, stream=True, max_tokens=2))
        # Each of five prefill steps and one decode step takes 10 s. Comments are sent every 15 s until the first token.
        assert response.body.count(b": keep-alive\n\n") == 3
        assert b"data: [DONE]\n\n" in response.body
        assert response.body.index(b": keep-alive") < response.body.index(b"data: ")


async def test_keep_alive_comments_during_several_prompts_lose_no_token(autojump_clock):
    async with open_memory_server(step_seconds=10, max_num_batched_tokens=8) as server:
        prompts = ["p" * 20, "q" * 20]
        body = completion(stream=True, max_tokens=3) | {"prompt": prompts}
        slow = await ask(server, "POST", "/v1/completions", body)
    async with open_memory_server() as server:
        fast = await ask(server, "POST", "/v1/completions", body)

    def texts(response: Response) -> dict[int, str]:
        joined: dict[int, str] = {}
        for line in response.body.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
        return joined

    assert b": keep-alive" in slow.body
    assert b": keep-alive" not in fast.body
    assert texts(slow) == texts(fast)
    assert set(texts(slow)) == {0, 1}


MESSAGE = {"messages": [{"role": "user", "content": "prompt"}]}
QUEUED_STREAMS = [
    ("/v1/completions", {**completion(), "stream": True, "max_tokens": 3}, b": keep-alive\n\n", b"data: [DONE]\n\n"),
    ("/v1/chat/completions", {**MESSAGE, "stream": True, "max_tokens": 3}, b": keep-alive\n\n", b"data: [DONE]\n\n"),
    (
        "/v1/responses",
        {"model": "fake", "input": "prompt", "stream": True, "max_output_tokens": 16},
        b": keep-alive\n\n",
        b"response.i",
    ),
    ("/v1/messages", {**MESSAGE, "stream": True, "max_tokens": 3}, b": keep-alive\n\n", b"event: message_stop"),
    ("/api/chat", {**MESSAGE, "model": "fake", "options": {"num_predict": 3}}, b" ", b'"done":true'),
]


@pytest.mark.parametrize(("path", "body", "comment", "end"), QUEUED_STREAMS, ids=[path for path, *_ in QUEUED_STREAMS])
async def test_stream_in_the_queue_sends_keep_alive_comments(autojump_clock, path, body, comment, end):
    rules = AccessRules(keep_alive_seconds=5)
    async with (
        open_memory_server(step_seconds=1, max_num_seqs=1, access=rules) as server,
        trio.open_nursery() as nursery,
    ):
        used_before = server.engine.stats().blocks_used
        nursery.start_soon(ask, server, "POST", "/v1/completions", completion(max_tokens=18))
        await trio.sleep(0.5)
        response = await server.client().post(path, body)
        received = await response.read()
        assert response.status == 200, received
        assert received.startswith(comment * 3)
        assert end in received
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used == used_before


async def test_a_stream_that_waited_long_in_the_queue_ends_with_an_error_event(autojump_clock):
    rules = AccessRules(keep_alive_seconds=5)
    async with (
        open_memory_server(step_seconds=1, max_num_seqs=1, access=rules) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, "POST", "/v1/completions", completion(max_tokens=30))
        await trio.sleep(0.5)
        body = completion(stream=True, queue_timeout=12)
        early, late = await ask_both(server, body)
        assert (early.status, early.body.count(b": keep-alive\n\n")) == (200, 2)
        assert b'"error"' in early.body
        assert b"[DONE]" not in early.body
        # The router may retry the request at another endpoint, so it gets the true status.
        assert (late.status, late.headers["x-trioserve-reason"]) == (504, "queue_timeout")


async def ask_both(server: MemoryServer, body: object) -> tuple[Response, Response]:
    """Send a request as a client and as a router that asks for heartbeats, and return both responses."""
    responses: dict[bool, Response] = {}

    async def ask_one(is_router: bool) -> None:
        headers = {"x_trioserve_heartbeat": "60"} if is_router else {}
        responses[is_router] = await ask(server, "POST", "/v1/completions", body, **headers)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_one, False)
        nursery.start_soon(ask_one, True)
    return responses[False], responses[True]
