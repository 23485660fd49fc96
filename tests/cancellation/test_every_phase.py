"""A client leaves, in every way and at every phase; somebody else is served meanwhile and must not notice.

Blocks are counted before, during and after, and states, since the model has layers that keep some. Time is virtual, and
forward passes are held open and let go by the test.
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
    """A server with one bystander in the middle of its response, and the next step held open."""

    def __init__(self, server: MemoryServer, bystander) -> None:
        self.server = server
        self.core = server.engine.core
        self.steps = server.engine.steps
        self.bystander = bystander
        self.used_before = self.core.stats().blocks_used

    async def step(self) -> None:
        """Let the step that is held end, and hold the next one."""
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
        # What the bystander is to get, made while it is alone.
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
        # Nothing is left of anybody: no block, no task, no place.
        check_idle(server.engine.core)
        assert server.connection_count == 0
        assert server.engine.live_requests() == []
        assert server.server.counters().exchanges_open == 0


def aborts(server: MemoryServer, phase: str) -> float:
    return server.engine.metrics.aborts_total.labels(phase)._value.get()


async def test_before_the_body_is_complete(leaver, http1_client, autojump_clock):
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
        # It never reached the engine.
        assert here.core.stats().prefix_query_tokens_total == queries_before


@pytest.mark.parametrize("stream", [True, False])
async def test_in_the_line(leaver, stream, http1_client, autojump_clock):
    """S28, S32, S37: whole responses like streamed ones."""
    new_client, way = leaver
    async with scene(http1_client, max_num_seqs=1) as here:
        queries_before = here.core.stats().prefix_query_tokens_total
        client = new_client(here.server)
        await client.ask(body(LONG_PROMPT, stream=stream))
        await wait_all_tasks_blocked()
        assert here.core.stats().waiting_count == 1
        await client.leave(way)
        await wait_all_tasks_blocked()
        # At once: the step that runs does not matter to it.
        assert here.core.stats().waiting_count == 0
        assert aborts(here.server, "queued") == 1
        await here.step()
        assert here.core.stats().prefix_query_tokens_total == queries_before


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chunks_before", [0, 1, 2])
async def test_during_a_long_prefill(leaver, stream, chunks_before, http1_client, autojump_clock):
    """S10, S28: whole responses like streamed ones."""
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
        # The forward pass still reads its blocks.
        assert here.core.stats().blocks_used == used_during
        await here.step()
        assert here.core.stats().blocks_used == here.bystander_blocks
        assert aborts(here.server, "prefill") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_between_two_tokens(leaver, stream, http1_client, autojump_clock):
    """S22, S28, S31: whole responses like streamed ones."""
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
async def test_during_the_last_step(leaver, stream, http1_client, autojump_clock):
    """S01: it counts as aborted, not as a success, and its blocks are back before the next schedule."""
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
        assert succeeded.labels("length")._value.get() == 1  # the one that was alone


async def test_while_reading_nothing(leaver, http1_client, autojump_clock):
    """The client stopped reading long ago; its response is merged and bounded, and its leaving is noticed."""
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
async def test_one_stream_of_a_connection_is_reset_and_the_others_go_on(http2_client, autojump_clock):
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
async def test_a_burst_of_leavers_leaves_nothing(http1_client, http2_client, autojump_clock):
    """Two hundred clients, each gone after another number of steps."""
    async with open_memory_server(step_seconds=0.01, block_count=64, max_queued_requests=300) as server:
        await wait_all_tasks_blocked()
        tasks_before = trio.lowlevel.current_statistics().tasks_living

        async def come_and_go(index: int) -> None:
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
                nursery.start_soon(come_and_go, index)
        await trio.sleep(2)
        check_idle(server.engine.core)
        await server.hang_up()  # who only reset a stream still has a connection
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks_before
        assert server.engine.live_requests() == []
