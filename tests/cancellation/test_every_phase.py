"""Tests a client that leaves, in each way and in each phase. Another client, the bystander, is served meanwhile.

The bystander's response must not change. The tests count blocks and state slots before, during and after. The model has
layers with recurrent state, so it needs state slots. Time is virtual, and the test decides when each forward pass ends.
"""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.memory_server import MemoryServer, open_memory_server

LONG_PROMPT = "a prompt that takes several chunks to compute, since a step is short"
PROMPT = "a prompt"


def body(prompt: str, *, stream: bool = True, max_tokens: int = 30) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


class Scene:
    """A server that has sent a part of the bystander's response. Its next step waits for the test."""

    def __init__(self, server: MemoryServer, bystander) -> None:
        self.server = server
        self.core = server.engine.core
        self.steps = server.engine.steps
        self.bystander = bystander
        self.used_before = self.core.stats().blocks_used

    async def step(self) -> None:
        """Let the step in flight end, and stop the next step in its forward pass."""
        self.steps.release()
        self.steps.hold()
        await wait_all_tasks_blocked()
        check_core(self.core)

    @property
    def bystander_blocks(self) -> int:
        (live,) = self.core.live_requests()
        return len(live.blocks)


@asynccontextmanager
async def scene(http1_client, **options: object):
    options = {"max_num_batched_tokens": 16, "block_size": 4, "block_count": 128, **options}
    options = {"state_slots": 8, "snapshot_slots": 4, **options}
    async with open_memory_server(**options) as server, trio.open_nursery() as nursery:
        # This request runs alone. Later, the bystander must get the same text.
        alone = http1_client(server)
        nursery.start_soon(alone.read)
        await alone.ask(body(PROMPT))
        await wait_all_tasks_blocked()
        await alone.leave("close")
        assert len(alone.text) > 0
        await wait_all_tasks_blocked()
        assert server.connection_count == 0
        check_idle(server.engine.core)

        server.engine.steps.hold()
        bystander = http1_client(server)
        nursery.start_soon(bystander.read)
        await bystander.ask(body(PROMPT))
        await server.engine.steps.entered()
        set_up = Scene(server, bystander)
        await set_up.step()
        await set_up.step()
        yield set_up

        server.engine.steps.release()
        await wait_all_tasks_blocked()
        assert bystander.text == alone.text
        await server.hang_up()
        await wait_all_tasks_blocked()
        # No block, request, connection or exchange remains.
        check_idle(server.engine.core)
        assert server.connection_count == 0
        assert server.engine.live_requests() == []
        assert server.server.counters().exchanges_open == 0


def aborts(server: MemoryServer, phase: str) -> float:
    return server.engine.metrics.aborts_total.labels(phase)._value.get()


async def test_client_that_leaves_before_its_body_is_complete_never_reaches_the_engine(
    leaver, http1_client, autojump_clock
):
    new_client, way = leaver
    async with scene(http1_client) as here:
        queries_before = here.core.stats().prefix_query_tokens_total
        client = new_client(here.server)
        await client.ask(body(PROMPT), missing_bytes=100)
        await wait_all_tasks_blocked()
        assert here.server.server.counters().exchanges_open == 2
        await client.leave(way)
        await wait_all_tasks_blocked()
        assert here.server.server.counters().exchanges_open == 1
        await here.step()
        # The request never reached the engine.
        assert here.core.stats().prefix_query_tokens_total == queries_before


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_the_queue_is_removed_from_it_at_once(leaver, stream, http1_client, autojump_clock):
    """Scenarios S28, S32 and S37 of tests/README.md: streamed and unstreamed responses."""
    new_client, way = leaver
    async with scene(http1_client, max_num_seqs=1) as here:
        queries_before = here.core.stats().prefix_query_tokens_total
        client = new_client(here.server)
        await client.ask(body(LONG_PROMPT, stream=stream))
        await wait_all_tasks_blocked()
        assert here.core.stats().waiting_count == 1
        await client.leave(way)
        await wait_all_tasks_blocked()
        # The request left the queue at once, without waiting for the step in flight.
        assert here.core.stats().waiting_count == 0
        assert aborts(here.server, "queued") == 1
        await here.step()
        assert here.core.stats().prefix_query_tokens_total == queries_before


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chunks_before", [0, 1, 2])
async def test_client_that_leaves_during_a_long_prefill_frees_its_blocks_with_the_step(
    leaver, stream, chunks_before, http1_client, autojump_clock
):
    """Scenarios S10 and S28 of tests/README.md: streamed and unstreamed responses."""
    new_client, way = leaver
    async with scene(http1_client) as here:
        client = new_client(here.server)
        await client.ask(body(LONG_PROMPT, stream=stream))
        await wait_all_tasks_blocked()
        for _ in range(chunks_before + 1):
            await here.step()
        used_during = here.core.stats().blocks_used
        victims = [live for live in here.core.live_requests() if len(live.tokens) > 60]
        assert len(victims) == 1
        assert victims[0].output_count == 0
        held = len(victims[0].blocks)
        assert held > 0
        await client.leave(way)
        await wait_all_tasks_blocked()
        # The forward pass still reads the blocks of the request.
        assert here.core.stats().blocks_used == used_during
        await here.step()
        assert here.core.stats().blocks_used == here.bystander_blocks
        assert aborts(here.server, "prefill") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_between_two_tokens_frees_its_blocks_with_the_step(
    leaver, stream, http1_client, autojump_clock
):
    """Scenarios S22, S28 and S31 of tests/README.md: streamed and unstreamed responses."""
    new_client, way = leaver
    async with scene(http1_client) as here:
        client = new_client(here.server)
        await client.ask(body("another", stream=stream))
        await wait_all_tasks_blocked()
        for _ in range(4):
            await here.step()
        assert here.core.stats().running_count == 2
        await client.leave(way)
        await wait_all_tasks_blocked()
        await here.step()
        assert here.core.stats().blocks_used == here.bystander_blocks
        assert aborts(here.server, "decode") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_during_the_last_step_counts_as_aborted(leaver, stream, http1_client, autojump_clock):
    """Scenario S01 of tests/README.md: the request counts as aborted, not as a success, and its blocks are free before
    the next schedule.
    """
    new_client, way = leaver
    async with scene(http1_client) as here:
        client = new_client(here.server)
        await client.ask(body("another", stream=stream, max_tokens=3))
        await wait_all_tasks_blocked()
        for _ in range(3):
            await here.step()
        victim = next(live for live in here.core.live_requests() if live.request.output_tokens_max == 3)
        assert victim.output_count == 2
        await client.leave(way)
        await wait_all_tasks_blocked()
        await here.step()
        assert here.core.stats().blocks_used == here.bystander_blocks
        succeeded = here.server.engine.metrics.request_success_total
        assert succeeded.labels("abort")._value.get() == 1
        assert succeeded.labels("length")._value.get() == 1  # This is the first request, which ran alone.


async def test_client_that_leaves_after_it_stopped_reading_frees_its_blocks(leaver, http1_client, autojump_clock):
    """The client stopped reading 20 steps earlier. Its unsent deltas are merged, and the server notices the
    disconnect.
    """
    new_client, way = leaver
    async with scene(http1_client) as here:
        client = new_client(here.server)
        await client.ask(body("another", max_tokens=100))
        await wait_all_tasks_blocked()
        for _ in range(20):
            await here.step()
        await client.leave(way)
        await wait_all_tasks_blocked()
        await here.step()
        assert here.core.stats().blocks_used == here.bystander_blocks


@pytest.mark.slow
async def test_reset_of_one_http2_stream_does_not_end_the_other_stream_of_its_connection(http2_client, autojump_clock):
    async with open_memory_server(step_seconds=0.01, block_count=128) as server, trio.open_nursery() as nursery:
        client = http2_client(server)
        nursery.start_soon(client.read)
        await client.ask(body("first", max_tokens=20))
        await client.ask(body("second", max_tokens=20))
        await trio.sleep(0.055)
        assert server.engine.core.stats().running_count == 2
        await client.leave("reset")
        await trio.sleep(0.02)
        assert server.engine.core.stats().running_count == 1
        await trio.sleep(1)
        assert client.received.count(b"[DONE]") == 1
        assert server.engine.metrics.request_success_total.labels("length")._value.get() == 1
        await client.leave("close")
        await wait_all_tasks_blocked()
        check_idle(server.engine.core)


@pytest.mark.slow
async def test_burst_of_clients_that_leave_at_different_steps_leaks_nothing(http1_client, http2_client, autojump_clock):
    """Two hundred clients leave, each after a different time."""
    async with open_memory_server(step_seconds=0.01, block_count=64, max_queued_requests=300) as server:
        await wait_all_tasks_blocked()
        tasks_before = trio.lowlevel.current_statistics().tasks_living

        async def ask_and_leave(index: int) -> None:
            client = (http1_client, http2_client)[index % 2](server)
            await trio.sleep(index % 7 * 0.004)
            await client.ask(body(f"{index % 5} {PROMPT}", max_tokens=50, stream=index % 3 != 0))
            with trio.move_on_after(index % 23 * 0.006):
                await client.read()
            await client.leave(client.ways_to_leave[index // 2 % len(client.ways_to_leave)])
            if index % 4 == 3:
                await client.stream.aclose()

        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(ask_and_leave, index)
        await trio.sleep(2)
        check_idle(server.engine.core)
        await server.hang_up()  # A client that only reset its stream still has a connection.
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before
        assert server.engine.live_requests() == []
