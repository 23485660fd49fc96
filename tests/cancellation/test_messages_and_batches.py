"""Tests clients of the Messages and Ollama APIs that leave, and batches that are cancelled, in each phase.

The tests count blocks before and after. The test decides when each forward pass ends.
"""

from __future__ import annotations

import json

import pytest
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_server import open_memory_server

LONG = "a question that takes several chunks to compute, since a step is short"
OPTIONS = {"max_num_batched_tokens": 16, "block_size": 4, "block_count": 128}
PHASES = ("body", "queue", "first chunk", "later chunk", "decode", "last step")
OUTPUTS = {"decode": 1, "last step": 2}
"""How many tokens each sequence has when its client leaves."""
RUNNING = PHASES[2:]


def message(*, stream: bool, max_tokens: int = 30) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }


def ollama_chat(*, stream: bool, max_tokens: int = 30) -> dict[str, object]:
    options = {"num_predict": max_tokens, "temperature": 0}
    return {"messages": [{"role": "user", "content": LONG}], "options": options, "stream": stream}


SURFACES = {"/v1/messages": message, "/api/chat": ollama_chat}


async def step(server) -> None:
    server.engine.steps.release()
    server.engine.steps.hold()
    await wait_all_tasks_blocked()


async def step_into(server, phase: str) -> None:
    """Run steps until all running sequences are in the phase.

    Args:
        server: its sequences are in their first forward pass.
        phase: one of RUNNING.
    """
    if phase == "later chunk":
        await step(server)
        await step(server)
    live = list(server.engine.core.live_requests())
    while any(one.output_count < OUTPUTS.get(phase, 0) for one in live):
        await step(server)
    assert all((one.output_count > 0) == (phase in OUTPUTS) for one in live)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", SURFACES)
async def test_client_that_leaves_frees_its_blocks_with_the_step_in_flight(
    leaver, path, stream, phase, http1_client, autojump_clock
):
    new_client, way = leaver
    asked = SURFACES[path]
    options = {**OPTIONS, "max_num_seqs": 1} if phase == "queue" else OPTIONS
    async with open_memory_server(**options) as server:
        core = server.engine.core
        server.engine.steps.hold()
        if phase == "queue":
            before = http1_client(server)
            await before.ask(asked(stream=False), path=path)
            await server.engine.steps.entered()
        client = new_client(server)
        tokens_max = 3 if phase == "last step" else 30
        missing = 100 if phase == "body" else 0
        await client.ask(asked(stream=stream, max_tokens=tokens_max), missing_bytes=missing, path=path)
        await wait_all_tasks_blocked()
        used_by_others = core.stats().blocks_used if phase == "queue" else 0
        if phase in RUNNING:
            await step_into(server, phase)
        used = core.stats().blocks_used
        assert (used > used_by_others) == (phase in RUNNING)
        await client.leave(way)
        await wait_all_tasks_blocked()
        assert core.stats().waiting_count == 0
        assert core.stats().blocks_used == used  # The forward pass still reads the blocks.
        if phase in RUNNING:
            await step(server)
        assert core.stats().blocks_used == used_by_others
        await server.hang_up()
        await wait_all_tasks_blocked()
        server.engine.steps.release()
        await server.assert_all_free()


def multipart_body(lines: list[dict[str, object]]) -> bytes:
    head = '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += '--b\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    return (head + "\n".join(map(json.dumps, lines)) + "\r\n--b--\r\n").encode()


@pytest.mark.parametrize("phase", ["queue", "first chunk", "later chunk", "decode", "last step"])
async def test_cancelled_batch_frees_its_blocks_with_the_step_in_flight(phase, autojump_clock):
    """The batch has four lines. Two of them run, or wait in the queue."""
    async with open_memory_server(**{**OPTIONS, "max_num_seqs": 4}) as server:
        core = server.engine.core
        url = "/v1/chat/completions"
        tokens_max = 3 if phase == "last step" else 30
        body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": tokens_max, "temperature": 0}
        lines = [{"custom_id": str(index), "method": "POST", "url": url, "body": body} for index in range(4)]
        client = server.client()
        headers = {"content-type": "multipart/form-data; boundary=b"}
        async with client.ask("/v1/files", multipart_body(lines), headers=headers) as response:
            file_id = (await response.json())["id"]
        server.engine.steps.hold()
        others = [server.client() for _ in range(4 if phase == "queue" else 0)]
        asked = []
        for other in others:
            ask = other.ask("/v1/messages", message(stream=False))
            asked.append(ask)
            await ask.__aenter__()
        await wait_all_tasks_blocked()
        used_by_others = core.stats().blocks_used
        made = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
        batch = await (await client.post("/v1/batches", made)).json()
        await wait_all_tasks_blocked()
        if phase in RUNNING:
            await step_into(server, phase)
        used = core.stats().blocks_used
        assert (used > used_by_others) == (phase in RUNNING)
        async with client.ask(f"/v1/batches/{batch['id']}/cancel", method="POST") as response:
            assert (await response.json())["status"] == "cancelled"
        assert core.stats().blocks_used == used  # The forward pass still reads the blocks.
        assert all(one.request.priority == 0 for one in core.live_requests() if phase == "queue")
        if phase in RUNNING:
            await step(server)
        assert core.stats().blocks_used == used_by_others
        for ask in asked:
            await ask.__aexit__(None, None, None)
        await step(server)
        server.engine.steps.release()
        await server.hang_up()
        await server.assert_all_free()
