"""Tests clients that leave while one engine computes their prompt and another engine generates their response.

The clients leave while blocks are held for the other engine, or while KV is loaded from the other engine. The tests
count blocks before, during and after. The test decides what the connector reports, and when.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_server import MemoryServer, open_memory_server
from trioserve.testing.scripted_connector import ScriptedConnector

PROMPT = "a prompt that takes several blocks"
HOLD = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
LOAD = {"do_remote_prefill": True, "remote_engine_id": "there", "remote_request_id": "its"}


def body(kv_transfer_params: object = None, **fields: object) -> dict[str, object]:
    asked = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True, "kv_transfer_params": HOLD}
    return asked | fields | ({} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params})


@asynccontextmanager
async def served(**options: object) -> AsyncIterator[tuple[MemoryServer, ScriptedConnector]]:
    """Run a server with a scripted connector. At the end, check that the server and the connector leak nothing."""
    async with open_memory_server(connector=ScriptedConnector, **options) as server:
        connector = server.engine.connector
        yield server, connector
        connector.release_all()
        await server.hang_up()
        await server.assert_all_free()
        assert not connector.sends
        assert not connector.loads
        assert server.connection_count == 0
        connector.check()


def events_of(received: bytes) -> list[object]:
    lines = [line.strip() for line in received.split(b"\n") if line.startswith(b"data: ")]
    return [line[6:].decode() if line.endswith(b"[DONE]") else json.loads(line[6:]) for line in lines]


def abort_notices(connector: ScriptedConnector) -> int:
    """Count how often the connector was notified of an abort after the end of its request."""
    return connector.calls["request_aborted_after_finish"]


# --- the engine that computes the prompt ---


async def test_client_that_leaves_while_its_blocks_are_held_notifies_the_connector(leaver, autojump_clock):
    new_client, way = leaver
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await wait_all_tasks_blocked()
        last = events_of(client.received)[-1]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["kv_transfer_params"]["do_remote_prefill"]
        stats = server.engine.stats()
        assert (stats.blocks_held, stats.blocks_used, stats.running_count) == (9, 0, 0)
        assert abort_notices(connector) == 0

        await client.leave(way)
        await wait_all_tasks_blocked()
        assert abort_notices(connector) == 1
        assert server.engine.stats().blocks_held == 9  # The other engine may still read these blocks.
        assert server.engine.live_requests() == []

        connector.release_all()
        await wait_all_tasks_blocked()
        stats = server.engine.stats()
        assert (stats.blocks_held, stats.blocks_free + stats.blocks_cached) == (0, stats.blocks_total)
        await client.leave("close")


async def test_stream_with_held_blocks_ends_when_the_blocks_have_been_read(new_client, autojump_clock):
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await trio.sleep(9)
        assert b"[DONE]" not in client.received
        connector.release_all()
        await wait_all_tasks_blocked()
        assert events_of(client.received)[-1] == "[DONE]"
        assert abort_notices(connector) == 0
        await client.leave("close")


async def test_stream_with_held_blocks_sends_keep_alive_comments(http1_client, autojump_clock):
    async with served(kv_hold_timeout=60.0) as (server, connector), trio.open_nursery() as nursery:
        client = http1_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await trio.sleep(50)
        assert client.received.count(b": keep-alive") == 3
        connector.release_all()
        await wait_all_tasks_blocked()
        assert events_of(client.received)[-1] == "[DONE]"
        await client.leave("close")


async def test_hold_without_a_release_ends_at_its_deadline(new_client, autojump_clock):
    async with served(kv_hold_timeout=4.0) as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await trio.sleep(3.9)
        assert server.engine.stats().blocks_held == 9
        await trio.sleep(0.2)
        await server.assert_all_free()
        assert len(connector.expired) == 1
        assert events_of(client.received)[-1] == "[DONE]"
        await client.leave("close")


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_by_id_of_a_request_with_held_blocks_notifies_the_connector_once(stream, autojump_clock):
    async with served() as (server, connector):
        client, operator = server.client(), server.client()
        async with client.ask("/v1/completions", body(stream=stream), headers={"x-request-id": "mine"}) as response:
            if stream:
                [event] = [await anext(response)]
                assert "kv_transfer_params" in event
            else:
                assert "kv_transfer_params" in await response.json()
            await wait_all_tasks_blocked()
            [shown] = (await (await operator.get("/v1/requests")).json())["data"]
            assert (shown["id"], shown["state"], shown["blocks"]) == ("mine", "held", 9)

            async with operator.ask("/v1/requests/mine", method="DELETE") as deleted:
                assert (await deleted.json())["result"] == "already_finished"
            assert abort_notices(connector) == 1
            aborted = await operator.post("/v1/requests/abort", {"ids": ["mine"]})
            assert (await aborted.json())["data"][0]["result"] == "already_finished"
            assert abort_notices(connector) == 1  # The connector gets no second notice.
            connector.release_all()
            if stream:
                # The response was already complete, so no further event is sent.
                assert [event async for event in response] == []
                assert response.body.endswith(b"data: [DONE]\n\n")
        await server.assert_all_free()


async def test_unstreamed_response_is_sent_at_once_and_its_blocks_stay_held_until_the_deadline(autojump_clock):
    async with served(kv_hold_timeout=4.0) as (server, connector):
        client = server.client()
        response = await client.post("/v1/completions", body(stream=False))
        assert (await response.json())["kv_transfer_params"]["do_remote_prefill"]
        client.close()
        await wait_all_tasks_blocked()
        # The client had received the complete response before it left, so the hold stays.
        assert abort_notices(connector) == 0
        assert server.engine.stats().blocks_held == 9
        await trio.sleep(4.1)
        await server.assert_all_free()


async def test_drain_waits_for_a_stream_with_held_blocks(new_client, autojump_clock):
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await wait_all_tasks_blocked()
        server.drain()
        await trio.sleep(5)
        assert b"[DONE]" not in client.received
        connector.release_all()
        await server.engine.wait_until_idle()
        await wait_all_tasks_blocked()
        assert events_of(client.received)[-1] == "[DONE]"
        await client.leave("close")


async def test_abort_at_the_end_of_a_drain_notifies_the_connector_of_every_hold(new_client, autojump_clock):
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        kept = await server.client().post("/v1/completions", body(stream=False, prompt=f"another: {PROMPT}"))
        assert kept.status == 200
        server.drain()
        assert abort_notices(connector) == 0
        server.engine.abort_all("the server is shutting down")
        assert abort_notices(connector) == 2
        connector.release_all()
        await server.engine.wait_until_idle()
        await wait_all_tasks_blocked()
        assert events_of(client.received)[-1] == "[DONE]"  # The response was complete before the abort.
        await client.leave("close")


async def test_client_that_leaves_before_its_prompt_is_computed_causes_no_hold(leaver, autojump_clock):
    new_client, way = leaver
    async with served(max_num_batched_tokens=16) as (server, connector), trio.open_nursery() as nursery:
        server.engine.steps.hold()
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body())
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used > 0
        await client.leave(way)
        await wait_all_tasks_blocked()
        server.engine.steps.release()
        await wait_all_tasks_blocked()
        await server.assert_all_free()
        assert connector.calls["transfer_params"] == 0
        await client.leave("close")


# --- the engine that generates the response ---


async def test_client_that_leaves_during_a_kv_load_has_its_blocks_held_until_the_load_ends(leaver, autojump_clock):
    new_client, way = leaver
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body(LOAD, max_tokens=20))
        await wait_all_tasks_blocked()
        assert server.engine.stats().remote_kv_count == 1
        used = server.engine.stats().blocks_used
        await client.leave(way)
        await wait_all_tasks_blocked()
        assert connector.calls["load_abandoned"] == 1
        stats = server.engine.stats()
        assert (stats.remote_kv_count, stats.blocks_used, stats.blocks_held) == (
            0,
            0,
            used,
        )  # The connector may still write to the held blocks.
        connector.fail_loads()
        await server.assert_all_free()
        await client.leave("close")


async def test_client_that_leaves_after_its_kv_load_frees_its_blocks_with_the_step(leaver, autojump_clock):
    new_client, way = leaver
    async with served() as (server, connector), trio.open_nursery() as nursery:
        client = new_client(server)
        nursery.start_soon(client.read)
        await client.ask(body(LOAD, max_tokens=20))
        await wait_all_tasks_blocked()
        server.engine.steps.hold()
        connector.load_all()
        await wait_all_tasks_blocked()
        await client.leave(way)
        await wait_all_tasks_blocked()
        assert server.engine.stats().blocks_used == 9  # The forward pass still reads these blocks.
        server.engine.steps.release()
        await server.assert_all_free()
        await client.leave("close")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_failed_kv_load_is_recomputed_or_answered_with_500_as_configured(stream, policy, autojump_clock):
    async with served(kv_load_failure_policy=policy) as (server, connector):
        client = server.client()
        async with client.ask("/v1/completions", body(LOAD, stream=stream)) as response:
            await wait_all_tasks_blocked()
            connector.fail_loads()
            status = await response.head()
            if policy == "fail":
                error = (await response.json())["error"]
                assert (status, error["code"]) == (500, "request_failed")
                assert "the other side is gone" in error["message"]
            else:
                assert status == 200
                await response.read()
        await server.assert_all_free()


async def test_kv_load_without_a_report_is_replaced_by_computing_at_its_deadline(autojump_clock):
    async with served(kv_load_timeout=3.0, kv_hold_timeout=2.0) as (server, _connector):
        client = server.client()
        begun_at = trio.current_time()
        assert (await client.post("/v1/completions", body(LOAD, stream=False))).status == 200
        assert trio.current_time() - begun_at == pytest.approx(3.0)
        assert server.engine.stats().blocks_held == 9  # The connector may still write to these blocks.
        await trio.sleep(2.1)
        await server.assert_all_free()


async def test_failed_kv_load_of_one_request_does_not_change_another_response(new_client, autojump_clock):
    async with (
        served(kv_load_failure_policy="fail", step_seconds=0.1) as (server, connector),
        trio.open_nursery() as nursery,
    ):
        alone = await (await server.client().post("/v1/completions", body({}, stream=False, max_tokens=20))).json()
        bystander = new_client(server)
        nursery.start_soon(bystander.read)
        await bystander.ask(body({}, max_tokens=20))
        client = server.client()
        async with client.ask("/v1/completions", body(LOAD, prompt=f"another: {PROMPT}")) as response:
            await trio.sleep(0.5)
            connector.fail_loads()
            assert await response.head() == 500
        await trio.sleep(5)
        assert bystander.text == alone["choices"][0]["text"]
        await bystander.leave("close")
