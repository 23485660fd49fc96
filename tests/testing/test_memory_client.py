"""Tests of MemoryClient: complete responses, streams, and every kind of disconnect, over HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing import ConnectionLost, MemoryTransport, open_memory_server

BODY = {"prompt": "hello", "max_tokens": 6}
STREAM = {**BODY, "stream": True}


@pytest.fixture(params=[1, 2])
def http(request: pytest.FixtureRequest) -> int:
    return request.param


async def test_one_connection_carries_several_requests_in_turn(http):
    async with open_memory_server(response="abc") as server:
        client = server.client(http=http)
        for _ in range(3):
            response = await client.post("/v1/completions", BODY, headers={"x-request-id": "mine"})
            assert (response.status, response.headers["x-request-id"]) == (200, "mine")
            assert (await response.json())["choices"][0]["text"] == "abc"
        assert (await client.get("/health")).status == 200
        assert server.connection_count == 1
        await server.assert_all_free()


async def test_iterating_a_stream_yields_its_events(http):
    async with open_memory_server(response="abc", paused=True) as server:
        async with server.client(http=http).ask("/v1/completions", STREAM) as response:
            await server.engine.step()
            assert await response.head() == 200
            assert (await anext(aiter(response)))["choices"][0]["text"] == "a"
            server.engine.resume()
            assert "".join([event["choices"][0]["text"] async for event in response]) == "bc"
            assert response.is_complete
            assert response.body.endswith(b"data: [DONE]\n\n")
        await server.assert_all_free()


async def test_leaving_the_context_of_a_memory_client_aborts_the_request(http):
    async with open_memory_server(paused=True) as server:
        client = server.client(http=http)
        async with client.ask("/v1/completions", STREAM):
            await server.engine.step()
            assert server.engine.stats().blocks_used > 0
        await server.assert_all_free()
        assert server.connection_count == (0 if http == 1 else 1)  # A reset ends only the stream.


async def test_cancelling_a_memory_client_aborts_the_request(http):
    async with open_memory_server(paused=True) as server:
        client = server.client(http=http)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.post, "/v1/completions", BODY)
            await server.engine.step()
            assert server.engine.stats().blocks_used > 0
            nursery.cancel_scope.cancel()
        await server.assert_all_free()


@pytest.mark.parametrize("way", ["close", "abort", "half_close"])
async def test_every_way_to_disconnect_a_memory_client_frees_blocks(http, way):
    async with open_memory_server(paused=True) as server:
        client = server.client(http=http)
        async with client.ask("/v1/completions", STREAM) as response:
            await server.engine.step()
            assert server.engine.stats().blocks_used > 0
            if way == "half_close":
                await client.half_close()
            else:
                getattr(client, way)()
            await server.assert_all_free()
            with pytest.raises(ConnectionLost):
                await response.read()


async def test_request_body_can_stay_incomplete(http):
    async with open_memory_server() as server:
        client = server.client(http=http)
        async with client.ask("/v1/completions", BODY, withheld_bytes=1) as response:
            await wait_all_tasks_blocked()
            assert server.server.counters().exchanges_open == 1
            assert response.status is None
        await server.assert_all_free()


async def test_requests_share_an_http2_connection():
    async with open_memory_server(response=lambda prompt: prompt * 2) as server, trio.open_nursery() as nursery:
        client = server.client(http=2)

        async def ask(prompt: str) -> None:
            response = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 50})
            assert (await response.json())["choices"][0]["text"] == prompt * 2

        for number in range(8):
            nursery.start_soon(ask, f"p{number}")
    assert server.engine.stats().running_count == 0


async def test_http1_client_refuses_a_second_request_at_the_same_time():
    async with open_memory_server(paused=True) as server:
        client = server.client()
        async with client.ask("/v1/completions", STREAM):
            with pytest.raises(AssertionError, match="one request at a time"):
                await client.get("/health")


async def test_bodies_larger_than_the_buffer_pass_in_both_directions(http):
    async with open_memory_server(max_model_len=300_000, block_count=100_000) as server:
        prompt = "x" * 200_000
        response = await server.client(http=http).post("/tokenize", {"prompt": prompt})
        assert (await response.json())["count"] == len(prompt)


@pytest.mark.slow
async def test_client_that_does_not_read_is_cancelled(http, autojump_clock):
    """The number of unread bytes is bounded, as with sockets. So the server cancels the request of a slow reader."""
    async with open_memory_server(max_model_len=4_000, block_count=1_000, step_seconds=0.1) as server:
        body = {"prompt": "hello", "max_tokens": 3_900, "ignore_eos": True, "stream": True}
        async with server.client(http=http).ask("/v1/completions", body):
            await trio.sleep(200)
            assert server.engine.stats().steps_total < 2_000
            assert server.engine.stats().running_count == 0
        await server.assert_all_free()


async def test_drain_of_a_memory_server_refuses_waiting_requests(http):
    async with (
        open_memory_server(max_num_seqs=1, paused=True) as server,
        server.client(http=http).ask("/v1/completions", STREAM) as first,
    ):
        await server.engine.step()
        async with server.client(http=http).ask("/v1/completions", STREAM) as second:
            await wait_all_tasks_blocked()
            server.drain()
            assert await second.head() == 503
            assert await first.head() == 200
            server.engine.resume()
            assert b"[DONE]" in await first.read()


async def test_cancelling_an_httpx_request_aborts_it():
    import httpx

    async with open_memory_server(paused=True) as server:
        async with (
            httpx.AsyncClient(transport=MemoryTransport(server.client), base_url="http://memory") as web,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(lambda: web.post("/v1/completions", json=BODY))
            await server.engine.step()
            assert server.engine.stats().blocks_used > 0
            nursery.cancel_scope.cancel()
        await server.assert_all_free()


async def test_httpx_can_stream_from_a_memory_server():
    import httpx

    async with (
        open_memory_server(response="abc") as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client), base_url="http://memory") as web,
        web.stream("POST", "/v1/completions", json=STREAM) as response,
    ):
        assert response.status_code == 200
        *events, last = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "abc"
        assert last == "[DONE]"
