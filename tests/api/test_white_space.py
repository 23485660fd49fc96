"""Tests whole JSON responses whose head and white space are sent before the body, with the whole server in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.api.heartbeat import WhiteSpaceExchange
from trioserve.http.asgi.app import AsgiApp
from trioserve.testing.httpx_transport import MemoryTransport
from trioserve.testing.memory_server import MemoryServer, open_memory_image_server, open_memory_server

from .conftest import MemoryExchange

RULES = AccessRules(keep_alive_seconds=5, keep_alive_json=True)
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
REQUESTS: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "/v1/completions": (
        {"prompt": "hello", "max_tokens": 12, "ignore_eos": True},
        lambda said: said["choices"][0]["finish_reason"] == "length",
    ),
    "/v1/chat/completions": (
        {**MESSAGES, "max_tokens": 12, "ignore_eos": True},
        lambda said: said["choices"][0]["message"]["content"],
    ),
    "/v1/responses": (
        {"model": "fake", "input": "hello", "max_output_tokens": 16},
        lambda said: said["object"] == "response",
    ),
    "/v1/messages": ({**MESSAGES, "max_tokens": 12}, lambda said: said["content"]),
    "/api/chat": (
        {**MESSAGES, "stream": False, "options": {"num_predict": 12}},
        lambda said: said["message"]["content"],
    ),
    "/v1/embeddings": ({"model": "fake", "input": "hello"}, lambda said: said["data"][0]["embedding"]),
}
QUEUED = {"prompt": "first", "max_tokens": 14, "ignore_eos": True}


async def ask(server: MemoryServer, path: str, body: object, *, http: int = 1, **headers: str) -> Any:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await server.client(http=http).post(path, body, headers=fields)
    await response.read()
    return response


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_slow_whole_response_sends_its_head_and_white_space_early(autojump_clock, path, http):
    body, is_whole = REQUESTS[path]
    async with (
        open_memory_server(step_seconds=1, max_num_seqs=1, access=RULES) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, "/v1/completions", QUEUED)
        await trio.sleep(0.5)
        began_at = trio.current_time()
        async with server.client(http=http).ask(path, body) as response:
            assert await response.head() == 200
            assert trio.current_time() - began_at == pytest.approx(5)
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-accel-buffering"] == "no"
            times = [trio.current_time() async for _ in response.pieces()]
        assert times[0] - began_at == pytest.approx(5)
        assert times[1] - times[0] == pytest.approx(5)
        white_space = len(response.body) - len(response.body.lstrip(b" "))
        assert white_space == (trio.current_time() - began_at) // 5
        assert is_whole(json.loads(response.body))
        await wait_all_tasks_blocked()
        await server.assert_all_free()


@pytest.mark.parametrize("rules", [RULES, AccessRules(keep_alive_seconds=5)], ids=["on", "off"])
async def test_a_fast_response_and_a_response_without_the_option_have_no_white_space(autojump_clock, rules):
    async with open_memory_server(step_seconds=0.1, access=rules) as server:
        response = await ask(server, "/v1/completions", QUEUED)
        assert response.headers["content-length"] == str(len(response.body))
        assert response.body.startswith(b"{")
        refused = await ask(server, "/v1/completions", {"prompt": "a", "n": 0})
        assert refused.status == 400
    async with open_memory_server(step_seconds=1, access=AccessRules(keep_alive_seconds=5)) as server:
        response = await ask(server, "/v1/completions", QUEUED)
        assert response.body.startswith(b"{")


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/completions", lambda said: said["error"]["code"]),
        ("/v1/messages", lambda said: said["type"] == "error" and said["error"]["message"]),
        ("/api/generate", lambda said: said["error"]),
    ],
)
async def test_an_error_after_the_head_is_the_body_in_the_format_of_the_api(autojump_clock, path, shape, http):
    body = {"model": "fake", "prompt": "second", "stream": False, "queue_timeout": 12, "max_tokens": 3}
    if path == "/v1/messages":
        body = {**MESSAGES, "max_tokens": 3}
    async with (
        open_memory_server(step_seconds=1, max_num_seqs=1, access=RULES) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, "/v1/completions", {**QUEUED, "max_tokens": 40})
        await trio.sleep(0.5)
        response = await ask(server, path, body, http=http, x_queue_timeout="12")
        assert response.status == 200
        assert response.body.startswith(b"  {")
        assert shape(json.loads(response.body))
        nursery.cancel_scope.cancel()
    await server.assert_all_free()


async def test_an_error_after_the_head_counts_as_a_failed_response_with_status_200(autojump_clock, caplog):
    caplog.set_level("INFO", logger="trioserve")
    async with open_memory_server(step_seconds=1, access=RULES, logs_requests=True) as server:
        response = await ask(server, "/v1/completions", QUEUED, x_request_timeout="7")
        assert json.loads(response.body)["error"]["code"] == "timeout"
    [line] = [line for line in caplog.messages if line.startswith("request ended")]
    assert "status=200" in line
    assert "outcome=finished" not in line


async def test_a_request_with_heartbeats_gets_no_early_head(autojump_clock):
    async with open_memory_server(step_seconds=1, access=RULES) as server:
        response = await ask(server, "/v1/completions", QUEUED, x_request_timeout="7", x_trioserve_heartbeat="3")
        assert response.status == 504
        assert response.body.startswith(b"{")


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("seconds", [3, 7])
async def test_a_client_that_leaves_before_or_after_the_head_frees_its_blocks(autojump_clock, http, seconds):
    async with open_memory_server(step_seconds=1, access=RULES) as server:
        assert server.engine.stats().blocks_used == 0
        client = server.client(http=http)
        with trio.move_on_after(seconds):
            async with client.ask("/v1/completions", {**QUEUED, "max_tokens": 60}) as response:
                await response.read()
        assert (response.body == b" ") == (seconds == 7)
        client.close()
        await trio.sleep(2)
        assert server.engine.stats().blocks_used == 0
        await server.assert_all_free()


async def test_a_client_of_http_1_0_gets_white_space_and_body_until_the_connection_closes(autojump_clock):
    async with open_memory_server(step_seconds=1, access=RULES) as server:
        end = server.connect()
        body = json.dumps(QUEUED).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nhost: test\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        await end.send_all(head + body)
        received = b"".join([piece async for piece in end])
        said = received.partition(b"\r\n\r\n")[2]
        assert said.startswith(b"  {")
        assert json.loads(said)["choices"]


@pytest.mark.parametrize("status", [200, 503])
async def test_white_space_is_sent_completely_before_the_body(autojump_clock, status):
    inner = MemoryExchange("POST", "/v1/completions", b"", ())
    inner.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        exchange = WhiteSpaceExchange(inner, nursery, 5, lambda: [("content-type", "application/json")])
        exchange.fill_silence()
        exchange.fill_silence()
        await trio.sleep(6)
        assert (inner.status, inner.data, exchange.started) == (200, b"", False)
        nursery.start_soon(exchange.respond, status, [("content-type", "application/json")], b"{}")
        await trio.sleep(20)
        inner.gate.set()
        await trio.sleep(20)
        assert (inner.status, inner.data, inner.finished, exchange.started) == (200, b" {}", True, True)


async def test_a_body_that_is_not_json_cannot_follow_the_early_head(autojump_clock):
    inner = MemoryExchange("POST", "/v1/completions", b"", ())
    async with trio.open_nursery() as nursery:
        exchange = WhiteSpaceExchange(inner, nursery, 5, lambda: [("content-type", "application/json")])
        exchange.fill_silence()
        await trio.sleep(6)
        with pytest.raises(RuntimeError, match="text/event-stream"):
            await exchange.start(200, [("content-type", "text/event-stream")])
        await exchange.respond(500, [("content-type", "application/json")], b'{"error": {}}')
        assert (inner.data, inner.finished) == (b' {"error": {}}', True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_openais_client_reads_a_response_with_white_space(autojump_clock):
    async with (
        open_memory_server(step_seconds=1, access=RULES) as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        raw = await client.chat.completions.with_raw_response.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], max_tokens=12
        )
        assert raw.text.startswith("  {")
        completion = raw.parse()
        assert completion.choices[0].message.content
        assert completion.usage.completion_tokens > 0
        vectors = await client.embeddings.create(model="fake", input="hello")
        assert vectors.data[0].embedding


async def test_a_large_response_follows_the_white_space_in_pieces(autojump_clock):
    async with open_memory_server(step_seconds=1, access=RULES, max_model_len=256) as server:
        response = await ask(server, "/v1/completions", {**QUEUED, "max_tokens": 12, "n": 16, "logprobs": 20})
        assert response.body.startswith(b"  ")
        assert len(json.loads(response.body)["choices"]) == 16


async def test_image_requests_send_white_space(autojump_clock):
    async with open_memory_image_server(step_seconds=1, access=RULES) as server:
        response = await server.client().post("/v1/images/generations", {"prompt": "a cat", "steps": 12})
        await response.read()
        assert response.status == 200
        assert response.body.startswith(b"  {"), response.body[:300]
        assert json.loads(response.body)["data"]


async def test_an_asgi_host_gets_head_white_space_and_body(autojump_clock):
    sent: list[dict[str, Any]] = []
    times: list[float] = []
    body = json.dumps(QUEUED).encode()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        times.append(trio.current_time())

    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await trio.sleep_forever()
            raise AssertionError("unreachable")
        return message

    async with open_memory_server(step_seconds=1, access=RULES) as server:
        began_at = trio.current_time()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"test")],
            "http_version": "1.1",
            "client": ("192.0.2.7", 99),
            "root_path": "",
        }
        await AsgiApp(server.app)(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    assert sent[0]["status"] == 200
    assert times[0] - began_at == pytest.approx(5)
    said = b"".join(message["body"] for message in sent[1:])
    assert said.startswith(b"  {")
    assert json.loads(said)["choices"]
