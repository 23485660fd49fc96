"""Tests clients that read slowly or not at all, with a whole server: how many bytes wait for such a client, how its
request ends, and that other clients are not delayed.

Time is virtual: a step of the engine takes 10 ms on any machine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import lockstep_stream_pair, memory_stream_pair

from trioserve.http.limits import FrontendLimits
from trioserve.testing.invariants import check_idle
from trioserve.testing.memory_server import MemoryServer, open_memory_server

STEP_SECONDS = 0.01
TOKENS = 300
STALL_SECONDS = 1.0
BUFFER_BYTES = 2048  # The buffer has space for about ten events.
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n"


def body(prompt: str) -> bytes:
    return json.dumps(
        {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()


@asynccontextmanager
async def opened(**limits: float) -> AsyncIterator[MemoryServer]:
    the_limits = FrontendLimits(
        **{"stream_buffer_bytes_max": BUFFER_BYTES, "stall_seconds_max": STALL_SECONDS, **limits}
    )
    async with open_memory_server(
        limits=the_limits, step_seconds=STEP_SECONDS, max_model_len=512, block_count=1024, max_num_seqs=16
    ) as server:
        yield server
        await server.hang_up()
        await trio.sleep(1)
        check_idle(server.engine.core)
        assert server.connection_count == 0


def texts(received: bytes) -> list[str]:
    """Return the text of each complete event."""
    events = [event.removeprefix(b"data: ") for event in received.split(b"\n\n")[:-1]]
    choices = [json.loads(event)["choices"] for event in events if event.startswith(b"{")]
    return [choice["text"] for [choice] in choices]


class QuickReader:
    """A client that reads at once, and records the time of each event."""

    def __init__(self, client) -> None:
        self.client = client
        self.times: list[float] = []
        self.received = b""

    async def read(self, prompt: str) -> None:
        client = self.client
        began_at = trio.current_time()
        stream_id = await client.request("/v1/completions", body=body(prompt))
        response = client.responses[stream_id]
        while not response.over:
            before = len(response.body)
            await client.receive()
            credit = len(response.body) - before
            if credit and not response.over:
                await client.credit(0, credit)
                await client.credit(stream_id, credit)
                self.times.append(round(trio.current_time() - began_at, 6))
        assert response.ended
        self.received = response.body


async def quick_reader(server: MemoryServer, h2_client) -> QuickReader:
    client = h2_client(server.connect())
    await client.open()
    return QuickReader(client)


async def stalls_in_http_2(server: MemoryServer, h2_client, nursery) -> None:
    """Open four streams with closed windows. One window opens by 1,000 bytes."""
    client = h2_client(server.connect())
    await client.open(INITIAL_WINDOW_SIZE=0)
    ids = [await client.request("/v1/completions", body=body(f"stalled {n}")) for n in range(4)]
    await client.credit(ids[0], 1000)
    nursery.start_soon(client.until_eof)


async def stalls_in_tcp_behind_http_2(server: MemoryServer, h2_client, nursery) -> None:
    ours, theirs = lockstep_stream_pair()
    nursery.start_soon(server.server.serve_connection, theirs)
    client = h2_client(ours)
    await client.open()
    await client.request("/v1/completions", body=body("stalled"))


async def stalls_in_http_1(server: MemoryServer, h2_client, nursery) -> None:
    ours, theirs = lockstep_stream_pair()
    nursery.start_soon(server.server.serve_connection, theirs)
    sent = body("stalled")
    await ours.send_all(HEAD.format(len(sent)).encode() + sent)


STALLS = [stalls_in_http_2, stalls_in_tcp_behind_http_2, stalls_in_http_1]


@pytest.mark.slow
@pytest.mark.parametrize("stall", STALLS)
async def test_stalled_readers_do_not_slow_down_other_clients(autojump_clock, nursery, h2_client, stall):
    """Scenario S49 of tests/README.md: other clients do not wait for a client that reads nothing."""
    async with opened() as server:
        alone = await quick_reader(server, h2_client)
        await alone.read("alone")
        # There are fewer events than tokens, because some tokens are only a part of a character.
        assert len(alone.times) > TOKENS / 2
    async with opened() as server:
        reader = await quick_reader(server, h2_client)
        for _ in range(3):
            await stall(server, h2_client, nursery)
        await reader.read("alone")
        # The first step of the request may be one step later. After that, the same delay applies to each event.
        delay = reader.times[0] - alone.times[0]
        assert 0 <= delay <= STEP_SECONDS + 1e-9
        assert [time - delay for time in reader.times] == pytest.approx(alone.times, abs=1e-9)
        assert texts(reader.received) == texts(alone.received)
        assert server.server.counters().exchanges_stalled_total == 3 * (4 if stall is stalls_in_http_2 else 1)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stall", STALLS)
async def test_stalled_reader_holds_few_bytes_and_its_request_is_cancelled(autojump_clock, nursery, h2_client, stall):
    """Scenarios S43 and S49 of tests/README.md: the handler only sends, and is still cancelled. Its blocks are free
    long before the end.
    """
    async with opened() as server:
        await stall(server, h2_client, nursery)
        most_held, began_at = 0, trio.current_time()
        stats = server.engine.stats
        await trio.sleep(0.1)
        assert stats().blocks_used > 0
        while stats().blocks_used:
            most_held = max(most_held, server.server.counters().answer_bytes_held)
            await trio.sleep(STEP_SECONDS)
        stream_count = 4 if stall is stalls_in_http_2 else 1
        assert 0 < most_held <= stream_count * (BUFFER_BYTES + 512)  # One frame or chunk may be in flight in addition.
        assert trio.current_time() - began_at < STALL_SECONDS + 0.5 < TOKENS * STEP_SECONDS
        counters = server.server.counters()
        assert (counters.exchanges_open, counters.exchanges_stalled_total) == (0, stream_count)
        nursery.cancel_scope.cancel()


async def test_slow_reader_gets_all_text_in_fewer_events(autojump_clock, h2_client):
    """Scenario S49 of tests/README.md: deltas are merged."""
    async with opened(stall_seconds_max=30) as server:
        quick = await quick_reader(server, h2_client)
        await quick.read("a prompt")
        client = h2_client(server.connect())
        await client.open(INITIAL_WINDOW_SIZE=0)
        stream_id = await client.request("/v1/completions", body=body("a prompt"))
        response = client.responses[stream_id]
        most_held = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.response, stream_id)
            while not response.over:
                await client.credit(stream_id, 500)
                await trio.sleep(0.2)  # In this time, the engine produces ten times more text.
                most_held = max(most_held, server.server.counters().answer_bytes_held)
        slow_texts, quick_texts = texts(response.body), texts(quick.received)
        assert "".join(slow_texts) == "".join(quick_texts)
        assert len(slow_texts) < len(quick_texts) / 3
        assert most_held <= BUFFER_BYTES


@pytest.mark.parametrize("stall", STALLS)
async def test_stalled_readers_do_not_delay_the_shutdown(autojump_clock, h2_client, stall):
    """Scenario S50 of tests/README.md: a client that reads nothing cannot block the shutdown."""
    async with (
        open_memory_server(
            limits=FrontendLimits(stream_buffer_bytes_max=BUFFER_BYTES, stall_seconds_max=1000, close_seconds_max=1),
            step_seconds=STEP_SECONDS,
            max_model_len=512,
            block_count=1024,
        ) as server,
        trio.open_nursery() as nursery,
    ):
        await stall(server, h2_client, nursery)
        await trio.sleep(1)
        assert server.server.counters().exchanges_open >= 1
        began_at = trio.current_time()
        server.server.drain()
        nursery.cancel_scope.cancel()
        server._nursery.cancel_scope.cancel()
    assert trio.current_time() - began_at <= 2.1
    assert server.server.counters().connections_open == 0


async def test_stream_reset_is_noticed_from_a_client_that_does_not_read(autojump_clock, h2_client):
    """Scenarios S31 and S43 of tests/README.md: the request ends with the running step, not with its last token."""
    async with opened(stall_seconds_max=1000) as server:
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.server.serve_connection, theirs)
            client = h2_client(ours)
            await client.open(INITIAL_WINDOW_SIZE=0)
            stream_id = await client.request("/v1/completions", body=body("left"))
            await trio.sleep(1)
            assert server.engine.stats().blocks_used > 0
            await client.reset(stream_id, ErrorCodes.CANCEL)
            await trio.sleep(2 * STEP_SECONDS)
            assert server.engine.stats().blocks_used == 0
            assert server.server.counters().exchanges_open == 0
            await ours.aclose()


async def test_stalled_readers_without_a_key_leave_slots_for_callers_with_a_key(autojump_clock, nursery, h2_client):
    """The clients without an API key read nothing, and keep their connections as long as the server allows."""
    limits = FrontendLimits(exchanges_max=16, streams_max=16)
    async with open_memory_server(limits=limits, api_keys=("k",)) as server:
        for _ in range(2):
            client = h2_client(server.connect())
            await client.open(INITIAL_WINDOW_SIZE=0)
            for _ in range(16):
                await client.request("/openapi.json", method="GET")
            nursery.start_soon(client.until_eof)
        await trio.sleep(1)
        counters = server.server.counters()
        assert (counters.exchanges_open, counters.streams_refused_total["unknown_callers"]) == (8, 24)
        for http in (1, 2):
            customer = server.client(http=http, headers={"authorization": "Bearer k"})
            response = await customer.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert response.status == 200
        stranger = server.client(headers={"authorization": "Bearer wrong"})
        async with stranger.ask("/v1/models", None, method="GET") as refused:
            assert await refused.head() == 503
        await trio.sleep(limits.stall_seconds_max)
        assert server.server.counters().exchanges_open == 0
        await server.hang_up()
        nursery.cancel_scope.cancel()
