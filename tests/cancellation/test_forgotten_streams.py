"""Tests HTTP/2 clients that abandon a stream. They send no reset, do not close the connection, and read nothing
more.
"""

from __future__ import annotations

import httpx
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners
from trioserve.testing.memory_server import open_memory_server

SECONDS_MAX = FrontendLimits().ping_seconds + FrontendLimits().ping_answer_seconds_max


async def test_unanswered_ping_frees_the_blocks_of_requests_that_no_client_reads(autojump_clock):
    """The responses are not streamed, because a stream that fills the client's buffers would already end at the stall
    limit.
    """
    asked = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    async with open_memory_server(step_seconds=0.0637, block_count=4096, max_model_len=10_000) as server:
        used_before = server.engine.stats().blocks_used
        client = server.client(http=2)
        async with client.ask("/v1/completions", asked), client.ask("/v1/completions", asked):
            await trio.sleep(1)  # The client reads nothing during this time.
            assert server.engine.stats().blocks_used > used_before
            await trio.sleep(SECONDS_MAX + 5)
            await wait_all_tasks_blocked()
            assert server.engine.stats().blocks_used == used_before
            assert server.server.counters().connections_refused_total["ping_unanswered"] == 1
        await server.assert_all_free()


async def test_unanswered_ping_frees_the_blocks_of_a_stream_that_synchronous_httpx_left_without_a_reset():
    """The test uses a real socket. After httpx has left the stream, it reads nothing and sends no RST_STREAM."""
    asked = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    limits = FrontendLimits(ping_seconds=0.1, ping_answer_seconds_max=0.2)
    listeners = await open_listeners("127.0.0.1", 0)
    url = f"http://{addresses(listeners)[0]}/v1/completions"

    def leave(client: httpx.Client) -> None:
        with client.stream("POST", url, json=asked, timeout=30) as response:
            assert response.http_version == "HTTP/2"
            next(response.iter_lines())

    async with (
        open_memory_server(limits=limits, step_seconds=0.02, block_count=4096, max_model_len=10_000) as server,
        trio.open_nursery() as nursery,
    ):
        used_before = server.engine.stats().blocks_used
        await nursery.start(server.server.serve, listeners)
        with httpx.Client(http1=False, http2=True, trust_env=False) as client, trio.fail_after(60):
            await trio.to_thread.run_sync(leave, client)
            assert server.engine.stats().blocks_used > used_before
            await server.engine.wait_until_idle()
            assert server.engine.stats().blocks_used == used_before
            assert server.server.counters().connections_refused_total["ping_unanswered"] == 1
        await server.assert_all_free()
        server.drain()
