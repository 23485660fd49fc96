"""Clients that forget a stream over HTTP/2: no reset, no close, and nobody reads the connection any more."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.http.limits import FrontendLimits
from trioserve.testing.memory_server import open_memory_server

SECONDS_MAX = FrontendLimits().ping_seconds + FrontendLimits().ping_answer_seconds_max


async def test_blocks_of_a_forgotten_request_are_free_after_an_unanswered_ping(autojump_clock):
    """Of whole responses, since a stream that fills the client's buffers ends by the bound on stalled writes."""
    asked = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    async with open_memory_server(step_seconds=0.0637, block_count=4096, context_tokens_max=10_000) as server:
        used_before = server.engine.stats().blocks_used
        client = server.client(http=2)
        async with client.ask("/v1/completions", asked), client.ask("/v1/completions", asked):
            await trio.sleep(1)  # nobody reads the connection meanwhile
            assert server.engine.stats().blocks_used > used_before
            await trio.sleep(SECONDS_MAX + 5)
            await wait_all_tasks_blocked()
            assert server.engine.stats().blocks_used == used_before
            assert server.server.counters().connections_refused_total["ping_unanswered"] == 1
        await server.assert_all_free()
