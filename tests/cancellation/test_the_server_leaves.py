"""Tests a server that shuts down. Every stream ends completely or with an error."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_router import open_memory_router
from trioserve.testing.memory_server import open_memory_server

TOKENS = 40
STEP_SECONDS = 0.01


def last_event(received: bytes) -> dict[str, object] | str:
    event = [line for line in received.split(b"\n") if line.startswith(b"data: ")][-1].removeprefix(b"data: ")
    return "[DONE]" if event == b"[DONE]" else json.loads(event)


@pytest.mark.parametrize("in_time", [True, False], ids=["in time", "too late"])
async def test_drain_ends_streams_complete_or_with_an_error_event_and_refuses_queued_requests(
    in_time, http1_client, http2_client, autojump_clock
):
    """Scenario S21 of tests/README.md: running streams get all of their text, or an error event with the reason.

    Queued requests get status 503, streamed or not. The clients use both protocols.
    """
    async with (
        open_memory_server(step_seconds=STEP_SECONDS, max_num_seqs=8, block_count=256) as server,
        trio.open_nursery() as nursery,
    ):
        running, waiting = [], []
        for index in range(16):
            client = (http1_client, http2_client)[index % 2](server)
            stream = index < 8 or index % 4 < 2
            asked = {"prompt": f"{index}", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
            await client.ask(asked)
            (running if index < 8 else waiting).append(client)
            if index < 8:
                nursery.start_soon(client.read)
                await trio.sleep(STEP_SECONDS)
        await wait_all_tasks_blocked()
        load = server.engine.load()
        assert (load.running, load.waiting) == (8, 8)

        server.drain()
        refused = [await client.response() for client in waiting]
        for response in refused:
            assert (response.status, response.headers["x-trioserve-reason"]) == (503, "draining")
            assert int(response.headers["retry-after"]) >= 1
        await trio.sleep(0.1)
        if not in_time:
            server.engine.abort_all("the server is shutting down")
        await server.engine.wait_until_idle()
        await trio.sleep(STEP_SECONDS)
        assert all(client.was_told_to_go for client in running if isinstance(client, http2_client))
        for client in running:
            end = last_event(client.received)
            if in_time:
                assert end == "[DONE]"
            else:
                assert b"[DONE]" not in client.received
                assert end["error"]["message"] == "the server is shutting down"
        await server.assert_all_free()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("through", ["server", "router"])
@pytest.mark.parametrize("http", [1, 2])
async def test_draining_server_answers_probes_and_refuses_requests_until_the_last_stream_has_ended(
    http, through, autojump_clock
):
    asked = {"prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    async with AsyncExitStack() as scopes:
        behind = await scopes.enter_async_context(open_memory_server(step_seconds=STEP_SECONDS))
        leaving = behind
        if through == "router":

            async def connect():
                return behind.connect()

            leaving = await scopes.enter_async_context(open_memory_router({"a": connect}))
            await wait_all_tasks_blocked()
        used_before = behind.engine.stats().blocks_used
        kept, streaming = leaving.client(http=http), leaving.client(http=http)
        assert (await kept.get("/ready")).status == 200
        stream = await streaming.post("/v1/completions", asked)
        await stream.head()
        leaving.announce_drain()
        # HTTP/1.1 ends each connection after its response. HTTP/2 ends a connection when no other stream runs.
        clients = [kept, leaving.client(http=http), *([streaming] if http == 2 else [])]
        for client in clients:
            ready = await client.get("/ready")
            assert (ready.status, ready.headers["x-trioserve-reason"]) == (503, "draining")
        for path in ("/health", "/metrics"):
            assert (await leaving.client(http=http).get(path)).status == 200
        refused = await leaving.client(http=http).post("/v1/completions", asked)
        assert (await refused.head(), refused.headers["x-trioserve-reason"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        if http == 1:
            assert refused.headers["connection"] == "close"
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        await leaving.server.wait_until_answered()
        leaving.drain()
        await wait_all_tasks_blocked()
        assert behind.engine.stats().blocks_used == used_before
