"""Tests streams that outlive the router that requested them: takeover by another router, end by name, and limits."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.limits import DetachSettings
from trioserve.testing.memory_server import open_memory_server

TEXT = "Hello, all of you!"
SETTINGS = DetachSettings(seconds_max=5, streams_max=2, streams_of_one_max=2)


@asynccontextmanager
async def opened(*, settings=SETTINGS, **options):
    options = {"response": TEXT, "max_model_len": 2048, "block_count": 1024, "paused": True, **options}
    async with open_memory_server(router_grace=settings, **options) as server:
        yield server
        await server.assert_all_free()


def request_stream(server, name="n1", *, stream=True, **headers):
    body = {"model": "fake", "prompt": "Hi", "stream": stream, "max_tokens": 100}
    return server.client().ask("/v1/completions", body, headers={"x-trioserve-keep": name, **headers})


def take_over(server, name="n1", **headers):
    return server.client().ask(f"/v1/kept_streams/{name}", headers=headers)


async def end_stream(server, name="n1", *, reader=1, **headers):
    async with server.client().ask(
        f"/v1/kept_streams/{name}?reader={reader}", method="DELETE", headers=headers
    ) as response:
        return (await response.json()).get("deleted")


async def text_of(response):
    return "".join([event["choices"][0]["text"] async for event in response])


async def begin(server, response, steps=3):
    await server.engine.step(steps)
    await response.head()
    await wait_all_tasks_blocked()


async def test_another_router_gets_the_whole_stream_of_a_dead_router(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as first:
            await begin(server, first)
            assert first.headers["x-trioserve-kept"] == "5;reader=1"
        await wait_all_tasks_blocked()
        assert server.app.router_streams.detached_count == 1
        async with take_over(server) as second:
            await second.head()
            assert second.headers["x-trioserve-kept"] == "5;reader=2"
            assert second.headers["x-request-id"] == first.headers["x-request-id"]
            server.engine.resume()
            assert await text_of(second) == TEXT
        assert server.app.router_streams.taken_over_total == 1
        await trio.sleep(6)
        assert server.app.router_streams.kept_count == 0


async def test_events_for_routers_are_not_numbered(autojump_clock):
    async with opened(paused=False) as server:
        async with request_stream(server) as response:
            await response.read()
        assert b"id: 1\n" not in response.body


async def test_stream_of_a_dead_router_ends_after_its_time_limit(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as response:
            await begin(server, response)
        await trio.sleep(4.9)
        assert server.engine.stats().blocks_used > 0
        await trio.sleep(0.2)
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used == 0
        assert server.app.router_streams.expired_total == 1
        async with take_over(server) as late:
            assert await late.head() == 404


async def test_router_ends_the_stream_of_a_client_that_left_at_once(autojump_clock):
    async with opened() as server:
        began_at = trio.current_time()
        async with request_stream(server) as response:
            await begin(server, response)
        assert await end_stream(server)
        assert server.engine.stats().blocks_used == 0
        assert trio.current_time() == began_at


async def test_replaced_reader_cannot_end_the_stream(autojump_clock):
    async with opened() as server, request_stream(server) as first:
        await begin(server, first)
        async with take_over(server) as second:
            await second.head()
            await first.read()
            assert b"stream_taken_over" in first.body
            assert await end_stream(server, reader=1) is False
            server.engine.resume()
            assert await text_of(second) == TEXT


async def test_router_that_leaves_cancels_a_request_that_has_no_stream_yet(autojump_clock):
    for stream in (True, False):
        async with opened() as server:
            async with request_stream(server, stream=stream):
                await wait_all_tasks_blocked()
                assert server.engine.live_requests()
            await server.assert_all_free()
            assert server.app.router_streams.kept_count == 0


async def test_duplicate_of_a_running_request_is_served_and_not_kept(autojump_clock):
    async with opened() as server, request_stream(server) as first, request_stream(server) as second:
        await begin(server, first)
        await second.head()
        assert "x-trioserve-kept" not in second.headers
        server.engine.resume()
        assert await text_of(first) == await text_of(second) == TEXT


async def test_restarted_request_replaces_an_unread_stream(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as first:
            await begin(server, first)
        await wait_all_tasks_blocked()
        async with request_stream(server) as second:
            await wait_all_tasks_blocked()
            assert len(server.engine.live_requests()) == 1
            server.engine.resume()
            assert await text_of(second) == TEXT
            assert second.headers["x-trioserve-kept"] == "5;reader=1"


async def test_streams_beyond_the_limit_are_served_and_not_kept(autojump_clock):
    async with (
        opened() as server,
        request_stream(server, "n1") as first,
        request_stream(server, "n2"),
        request_stream(server, "n3") as third,
    ):
        await begin(server, first)
        await third.head()
        assert "x-trioserve-kept" not in third.headers
        server.engine.resume()
        assert await text_of(third) == TEXT


async def test_finished_stream_is_removed_for_a_new_stream(autojump_clock):
    async with opened(paused=False) as server:
        for name in ("n1", "n2", "n3", "n4"):
            async with request_stream(server, name) as response:
                assert await text_of(response) == TEXT
                assert "x-trioserve-kept" in response.headers
        assert server.app.router_streams.kept_count == 2


async def test_another_key_cannot_find_a_kept_stream(autojump_clock):
    mine, other = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    async with opened(api_keys=("one", "two")) as server:
        async with request_stream(server, **mine) as response:
            await begin(server, response)
        async with take_over(server, **other) as refused:
            assert await refused.head() == 404
        assert await end_stream(server, **other) is None
        assert server.engine.stats().blocks_used > 0
        assert await end_stream(server, **mine)


@pytest.mark.parametrize("header", ["", "a b", "x" * 129])
async def test_invalid_stream_name_is_refused(header):
    async with opened(paused=False) as server, request_stream(server, header) as response:
        assert await response.head() == 400
        assert "X-Trioserve-Keep" in (await response.json())["error"]["message"]


async def test_router_that_leaves_cancels_its_stream_if_the_grace_time_is_zero(autojump_clock):
    async with opened(settings=DetachSettings(seconds_max=0)) as server:
        async with request_stream(server) as response:
            await begin(server, response)
            assert "x-trioserve-kept" not in response.headers
        await server.assert_all_free()


async def test_reader_is_refused_if_events_were_dropped(autojump_clock):
    settings = DetachSettings(seconds_max=5, streams_max=2, streams_of_one_max=2, bytes_max=1000)
    async with opened(settings=settings, paused=False) as server:
        async with request_stream(server) as response:
            await response.read()
        async with take_over(server) as late:
            assert await late.head() == 410


async def test_draining_server_ends_unread_streams(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as response:
            await begin(server, response)
        server.app.drain()
        await server.assert_all_free()


async def test_reader_that_asks_for_unread_is_refused_while_the_stream_has_a_reader(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as first:
            await begin(server, first)
            async with server.client().ask("/v1/kept_streams/n1?unread=1") as refused:
                assert await refused.head() == 409
        await wait_all_tasks_blocked()
        async with server.client().ask("/v1/kept_streams/n1?unread=1") as second:
            server.engine.resume()
            assert await text_of(second) == TEXT


@pytest.mark.parametrize(("names", "kept_count"), [(("n1", "n2", "n3"), 2), (("n1", "n1"), 1)])
async def test_limit_of_kept_streams_is_checked_after_the_body_arrived(autojump_clock, names, kept_count):
    """The server receives the heads of all requests before any body.

    The limit holds, and a duplicate does not replace a stream with a reader.
    """
    body = b'{"model": "fake", "prompt": "Hi", "stream": true, "max_tokens": 100}'
    async with opened(paused=False) as server:
        connections = [server.connect() for _ in names]
        for connection, name in zip(connections, names, strict=True):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Trioserve-Keep: {name}\r\nConnection: close\r\n"
            await connection.send_all(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body))
        await wait_all_tasks_blocked()
        responses = []
        server.engine.pause()
        for connection in connections:
            await connection.send_all(body)
            await wait_all_tasks_blocked()
        assert server.app.router_streams.kept_count == kept_count
        server.engine.resume()
        for connection in connections:
            responses.append(b"".join([part async for part in connection]))
            await connection.aclose()
        assert all(response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for response in responses), responses
        assert sum(b"x-trioserve-kept: " in response.lower() for response in responses) == kept_count
        await trio.sleep(6)
