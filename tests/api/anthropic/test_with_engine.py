"""Tests the Messages API with the whole server in memory: clients that leave in each phase, silent streams, and aborts
by id.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_server import MemoryServer, open_memory_server

PATH = "/v1/messages"


def body(text: str = "Hi", *, stream: bool = True, max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": 0,
        **fields,
    }


async def step(server: MemoryServer) -> None:
    server.engine.steps.release()
    server.engine.steps.hold()
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step_count", [0, 1, 2, 5])
async def test_client_that_leaves_frees_all_blocks_one_step_later(http, stream, step_count, autojump_clock):
    """The client leaves during a prefill in several chunks, or between two output tokens."""
    async with open_memory_server(max_num_batched_tokens=16, block_count=128) as server, trio.open_nursery() as nursery:
        server.engine.steps.hold()
        client = server.client(http=http)

        scope = trio.CancelScope()

        async def ask() -> None:
            with scope:
                async with client.ask(PATH, body("a question of more than one chunk", stream=stream)) as response:
                    await response.read()

        nursery.start_soon(ask)
        await server.engine.steps.entered()
        for _ in range(step_count):
            await step(server)
        used = server.engine.core.stats().blocks_used
        assert used > 0
        scope.cancel()
        await wait_all_tasks_blocked()
        assert server.engine.core.stats().blocks_used == used  # The running forward pass still reads the blocks.
        await step(server)
        assert server.engine.core.stats().blocks_used == 0
        server.engine.steps.release()
        await server.assert_all_free()


async def test_request_of_a_client_that_leaves_the_queue_is_never_computed(autojump_clock):
    async with open_memory_server(max_num_seqs=1, step_seconds=0.1) as server, trio.open_nursery() as nursery:
        first, second = server.client(), server.client()
        nursery.start_soon(first.post, PATH, body(max_tokens=10))
        await trio.sleep(0.15)
        async with second.ask(PATH, body()):
            await wait_all_tasks_blocked()
            assert server.engine.core.stats().waiting_count == 1
        await wait_all_tasks_blocked()
        assert server.engine.core.stats().waiting_count == 0
    await server.assert_all_free()


async def test_silent_message_stream_sends_pings(autojump_clock):
    async with open_memory_server(step_seconds=10, max_num_batched_tokens=16) as server:
        response = await server.client().post(PATH, body("p" * 40, max_tokens=2))
        assert response.body.count(b"event: ping\n") >= 3
        assert response.body.index(b"event: ping") < response.body.index(b"event: content_block_start")
        assert b"message_stop" in response.body


async def test_abort_by_id_ends_the_stream_with_an_error(autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        client, operator = server.client(), server.client()
        events = []
        async with client.ask(PATH, body(), headers={"x-request-id": "mine"}) as response:
            async for event in response:
                events.append(event)
                if event["type"] == "content_block_start":
                    async with operator.ask("/v1/requests/mine", method="DELETE") as aborted:
                        assert (await aborted.json())["result"] == "aborted"
        assert response.headers["request-id"] == "mine"
        assert events[-1]["type"] == "error"
        assert events[-1]["request_id"] == "mine"
        assert "message_stop" not in [event["type"] for event in events]
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_request_deadline_ends_the_request(autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        response = await server.client().post(PATH, body(stream=False, timeout=0.35))
        assert response.status == 504
        assert b"timeout_error" in response.body
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_every_max_tokens_is_accepted_and_reduced_to_the_context() -> None:
    context_tokens_max = 64
    async with open_memory_server(
        max_model_len=context_tokens_max, max_num_batched_tokens=context_tokens_max, block_count=64
    ) as server:
        client = server.client()

        async def ask(path: str, asked: dict[str, Any]) -> Any:
            async with client.ask(path, asked) as response:
                return await response.json()

        first = await ask(PATH, body(stream=False, max_tokens=1))
        room = context_tokens_max - first["usage"]["input_tokens"]
        assert 1 < room < context_tokens_max
        for tokens_max in (1, room - 1, room, room + 1, context_tokens_max - 1, context_tokens_max, 32_000):
            message = await ask(PATH, body(stream=False, max_tokens=tokens_max))
            assert message["usage"]["output_tokens"] <= min(tokens_max, room)
            assert message["type"] == "message", message
            line = await ask(
                "/api/generate",
                {"prompt": "Hi", "stream": False, "options": {"num_predict": tokens_max, "temperature": 0}},
            )
            assert line["done"], line
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": room + 1}
        assert (await ask("/v1/chat/completions", chat))["error"]["code"] == "context_length_exceeded"
        await server.assert_all_free()
