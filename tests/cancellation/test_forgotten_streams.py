"""Clients that forget a stream over HTTP/2: no reset, no close, and nobody reads the connection any more."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.http.limits import FrontendLimits
from trioserve.testing.memory_server import open_memory_server

SECONDS_MAX = FrontendLimits().ping_seconds + FrontendLimits().ping_answer_seconds_max


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_blocks_of_a_forgotten_stream_are_free_after_an_unanswered_ping(autojump_clock, stream):
    asked = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    async with open_memory_server(step_seconds=0.01, block_count=4096, context_tokens_max=10_000) as server:
        used_before = server.engine.stats().blocks_used
        client = server.client(http=2)
        for _ in range(2):
            await client.post("/v1/completions", asked)
        await trio.sleep(1)
        assert server.engine.stats().blocks_used > used_before
        await trio.sleep(SECONDS_MAX)
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used == used_before
        await server.assert_all_free()
        assert server.server.counters().connections_refused_total["ping_unanswered"] == 1
