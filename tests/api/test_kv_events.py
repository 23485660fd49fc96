"""Tests GET /kv_events over a connection in memory: access rights, events, and the state after a reader leaves."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.operations.kv_events import ALIVE_SECONDS
from trioserve.api.sse import KEEP_ALIVE
from trioserve.contracts.endpoint import BlocksStored, KvEvent, ResidencySnapshot
from trioserve.engine import kv_cache
from trioserve.proxy.routed_body import block_names
from trioserve.testing.memory_client import MemoryResponse
from trioserve.testing.memory_server import MemoryServer, open_memory_server

PATH = "/kv_events"


class Reader:
    """A reader that follows the events of a response. `resident` has the names of the cached blocks. None: no complete
    snapshot has arrived.
    """

    def __init__(self, response: MemoryResponse) -> None:
        self.response = response
        self.events: list[KvEvent] = []
        self.resident: set[bytes] | None = None
        self._snapshot: set[bytes] = set()

    async def read(self) -> None:
        """Read until no more events arrive."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_on)
                await wait_all_tasks_blocked()
                scope.cancel()

    async def _read_on(self) -> None:
        async for event in self.response:
            self.take(msgspec.convert(event, KvEvent, builtin_types=()))

    def take(self, event: KvEvent) -> None:
        self.events.append(event)
        if isinstance(event, ResidencySnapshot):
            self._snapshot |= set(event.hashes)
            if not event.left:
                self.resident, self._snapshot = self._snapshot, set()
            return
        assert self.resident is not None
        if isinstance(event, BlocksStored):
            self.resident |= set(event.hashes)
        else:
            self.resident -= set(event.hashes)


async def say(server: MemoryServer, prompt: str, **fields: object) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    response = await server.client().post("/v1/completions", body)
    assert response.status == 200, response.body


@pytest.mark.fake_engine(kv_events_max=1000, block_count=32)
async def test_reader_of_kv_events_knows_the_cached_blocks_after_stores_and_evictions(memory_server):
    await say(memory_server, "good morning")
    resident = memory_server.engine.core.cache.resident_hashes
    async with memory_server.client().ask(PATH) as response:
        reader = Reader(response)
        await reader.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [type(event) for event in reader.events] == [ResidencySnapshot]
        assert reader.resident == set(block_names(b"good morning", 4, None)) | set(resident())
        for index in range(12):
            await say(memory_server, f"{index} is another text that fills some blocks")
            await reader.read()
            assert reader.resident == set(resident())
    assert len(memory_server.engine.kv_events._ring) > 100, "some blocks were evicted"


@pytest.mark.fake_engine(kv_events_max=1000)
async def test_block_names_depend_on_tokens_salt_and_chat_template(memory_server):
    chat = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 1}
    rendered = b"user: hello there\nassistant: "
    await memory_server.client().post("/v1/chat/completions", chat)
    await memory_server.client().post("/v1/chat/completions", {**chat, "cache_salt": "mine"})
    async with memory_server.client().ask(PATH) as response:
        reader = Reader(response)
        await reader.read()
    assert set(block_names(rendered, 4, None)) | set(block_names(rendered, 4, "mine")) == reader.resident
    assert len(reader.resident) == 2 * 7


async def test_kv_events_are_off_by_default(memory_server):
    response = await memory_server.client().get(PATH)
    assert (response.status, response.headers["x-trioserve-reason"]) == (404, "kv_events_off")
    assert "--kv-events" in (await response.json())["error"]["message"]
    assert memory_server.engine.core.cache.on_residency is None


async def test_only_the_admin_reads_kv_events_of_a_server_with_keys():
    async with open_memory_server(kv_events_max=10, api_keys=("user",), admin_api_key="boss") as server:
        assert (await server.client().get(PATH)).status == 401
        user = server.client(headers={"authorization": "Bearer user"})
        response = await user.get(PATH)
        assert (response.status, response.headers["x-trioserve-reason"]) == (403, "not_admin")
        admin = server.client(headers={"authorization": "Bearer boss"})
        async with admin.ask(PATH) as events:
            assert await events.head() == 200


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.fake_engine(kv_events_max=10)
async def test_reader_of_kv_events_that_leaves_frees_its_slot_for_another_reader(memory_server, http, monkeypatch):
    monkeypatch.setattr(kv_cache, "READERS_MAX", 1)
    for _ in range(3):
        async with memory_server.client(http=http).ask(PATH) as response:
            assert await response.head() == 200
            refused = await memory_server.client().get(PATH)
            assert (refused.status, refused.headers["x-trioserve-reason"]) == (429, "too_many_readers")
        await memory_server.assert_all_free()


@pytest.mark.slow
@pytest.mark.fake_engine(kv_events_max=64, block_count=512, max_model_len=2048, max_num_batched_tokens=2048)
async def test_slow_reader_of_kv_events_blocks_nothing_and_gets_the_final_state(memory_server):
    engine = memory_server.engine
    async with memory_server.client().ask(PATH) as response:
        reader = Reader(response)
        await reader.read()
        for index in range(100):
            await say(memory_server, f"{index:04}" * 450)
        assert engine.kv_events.next_sequence > 80_000
        assert len(engine.kv_events._ring) == 64
        await reader.read()
        assert reader.resident == set(engine.core.cache.resident_hashes())
        assert sum(isinstance(event, ResidencySnapshot) for event in reader.events) < 1000


@pytest.mark.fake_engine(kv_events_max=10)
async def test_silent_stream_of_kv_events_sends_keep_alives(memory_server, autojump_clock):
    async with memory_server.client().ask(PATH) as response:
        await response.head()
        with trio.move_on_after(3.5 * ALIVE_SECONDS):
            await response.read()
        assert response.body.count(KEEP_ALIVE) == 3


@pytest.mark.fake_engine(kv_events_max=10)
async def test_the_stream_ends_when_the_engine_closes(memory_server):
    async with memory_server.client().ask(PATH) as response:
        await response.head()
        memory_server.engine.drain()
        await response.read()
    refused = await memory_server.client().get(PATH)
    assert refused.status == 503


@pytest.mark.fake_engine(kv_events_max=10)
async def test_head_request_for_kv_events_gets_a_response_at_once(memory_server):
    async with memory_server.client(http=2).ask(PATH, method="HEAD") as response:
        assert await response.read() == b""
        assert response.status == 200
