"""Tests how a client can still use its request after its connection was lost.

The client can abort the request by its id. A repeated request finds the blocks in the prefix cache.
"""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.events import AbortOutcome
from trioserve.testing.invariants import check_idle
from trioserve.testing.memory_server import open_memory_server

PROMPT = "a long document that somebody pastes before every question: " * 2
BLOCK_SIZE = 4
STEP_TOKENS = 16


def body(*, stream: bool = True) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": stream}


def small_server():
    return open_memory_server(
        max_num_batched_tokens=STEP_TOKENS, block_size=BLOCK_SIZE, block_count=128, max_model_len=256
    )


@pytest.mark.parametrize("steps_before", [1, 3, 6, 12], ids=lambda count: f"{count} steps")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_repeated_request_finds_the_blocks_of_an_abandoned_request_in_the_prefix_cache(
    leaver, stream, steps_before, autojump_clock
):
    """Scenario S33 of tests/README.md: full blocks stay cached when a client leaves during prefill or decode.

    The step in flight caches no further blocks for the client that left.
    """
    new_client, way = leaver
    async with small_server() as server, trio.open_nursery() as nursery:
        core, steps = server.engine.core, server.engine.steps
        steps.hold()
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body(stream=stream))
        await steps.entered()
        for _ in range(steps_before):
            steps.release()
            steps.hold()
            await wait_all_tasks_blocked()
        assert core.stats().blocks_used > 0
        await client.leave(way)
        await wait_all_tasks_blocked()
        steps.release()
        await wait_all_tasks_blocked()
        check_idle(core)

        again = new_client(server)
        await again.ask(body(stream=False))
        usage = (await again.response()).json["usage"]
        computed = min(steps_before * STEP_TOKENS, len(PROMPT) - 1)  # The last token is always computed.
        assert usage["prompt_tokens_details"]["cached_tokens"] == computed // BLOCK_SIZE * BLOCK_SIZE > 0
        assert usage["completion_tokens"] == 30
        check_idle(core)
        nursery.cancel_scope.cancel()


async def test_stream_can_be_aborted_before_its_first_token_by_the_id_in_its_head(new_client, autojump_clock):
    """Scenario S25 of tests/README.md: the head is sent when prefill starts, and the id in the head can be aborted at
    once.
    """
    async with small_server() as server, trio.open_nursery() as nursery:
        engine, steps = server.engine, server.engine.steps
        steps.hold()
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await steps.entered()
        await wait_all_tasks_blocked()
        assert b"data: " not in client.received
        request_id = client.headers["x-request-id"]
        assert engine.abort([request_id]) == {request_id: AbortOutcome.ABORTED}
        steps.release()
        await wait_all_tasks_blocked()
        assert steps.step_count == 1
        assert client.received.count(b"data: ") == 1
        assert b"request_aborted" in client.received
        assert engine.metrics.aborts_total.labels("prefill")._value.get() == 1
        check_idle(server.engine.core)
        nursery.cancel_scope.cancel()
