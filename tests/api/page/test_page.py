"""Tests the live page over a connection in memory: files, access rights, events, and the state after readers leave."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules
from trioserve.api.page import ALIVE_SECONDS, Page, PageSettings, fold
from trioserve.testing.memory_client import MemoryResponse
from trioserve.testing.memory_server import MemoryServer, open_memory_server

COMPLETIONS = "/v1/completions"
KEPT = ("_watched", "_keys", "_ended", "_outcomes", "_cancels", "_freed")
PATH = "/ui/events"


class Reader:
    """A reader of the live page, with the state that the page shows. `events` has the name and the JSON of each event,
    in order.
    """

    def __init__(self, response: MemoryResponse) -> None:
        self.response = response
        self.events: list[tuple[str, Any]] = []
        self.shown: dict[str, Any] = {}
        self._taken = 0

    async def read(self) -> None:
        """Read all events that have arrived by now."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_on)
                await wait_all_tasks_blocked()
                scope.cancel()
        *whole, _rest = self.response.body[self._taken :].split(b"\n\n")
        self._taken += sum(len(event) + 2 for event in whole)
        for event in whole:
            lines = event.decode().split("\n")
            if lines[0].startswith("event: "):
                name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
                self.events.append((name, data))
                if name == "snapshot":
                    self.shown = data
                else:
                    fold(self.shown, data)

    async def _read_on(self) -> None:
        async for _piece in self.response.pieces():
            pass


@asynccontextmanager
async def reading(server: MemoryServer, query: str = "", **headers: str) -> AsyncIterator[Reader]:
    async with server.client(headers=headers).ask(PATH + query) as response:
        reader = Reader(response)
        await reader.read()
        yield reader


async def test_page_reader_gets_a_snapshot_and_then_changes(memory_server, mock_clock):
    async with reading(memory_server) as reader:
        (name, snapshot), *others = reader.events
        assert (name, others) == ("snapshot", [])
        assert snapshot["server"]["model"] == "fake"
        assert snapshot["blocks"] == [[1024, 0]]


@pytest.mark.fake_engine(paused=True)
async def test_a_request_is_shown_from_the_queue_to_its_end(memory_server, mock_clock):
    engine = memory_server.engine
    async with (
        reading(memory_server) as reader,
        memory_server.client().ask(
            COMPLETIONS,
            {"prompt": "good morning", "max_tokens": 3, "ignore_eos": True, "stream": True},
            headers={"x-request-id": "r"},
        ) as response,
    ):
        await wait_all_tasks_blocked()
        await tick(reader, mock_clock)
        assert reader.shown["requests"]["r"]["state"] == "waiting"
        await engine.step()
        await tick(reader, mock_clock)
        request = reader.shown["requests"]["r"]
        assert (request["state"], request["phase"], request["completion_tokens"]) == ("running", "decode", 1)
        assert sum(count for _, count in request["blocks"]) == reader.shown["stats"]["blocks_used"] == 3
        engine.resume()
        await response.read()
        await tick(reader, mock_clock)
        request = reader.shown["requests"]["r"]
        assert (request["state"], request["outcome"], request["blocks"]) == ("finished", "finished", [])
        assert request["freed"] is None
        for _ in range(4):
            await tick(reader, mock_clock, 10)
        assert reader.shown["requests"] == {}


async def tick(reader: Reader, clock: trio.testing.MockClock, seconds: float = 0.4) -> None:
    """Let more than one interval pass."""
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()
    await reader.read()


def states(shown: dict[str, Any]) -> list[int]:
    return [state for count, state in shown["blocks"] for _ in range(count)]


@pytest.mark.fake_engine(paused=True, enable_prefix_caching=False)
@pytest.mark.parametrize("way", ["by id", "by its client"])
async def test_page_shows_the_blocks_of_a_cancelled_request_as_free(memory_server, mock_clock, way):
    engine = memory_server.engine
    async with reading(memory_server) as reader:
        client = memory_server.client()
        async with client.ask(
            COMPLETIONS,
            {"prompt": "good morning", "max_tokens": 9, "stream": True},
            headers={"x-request-id": "r"},
        ) as response:
            await engine.step()
            await response.head()
            await tick(reader, mock_clock)
            blocks = [first + i for first, count in reader.shown["requests"]["r"]["blocks"] for i in range(count)]
            assert len(blocks) == 3, "the next step allocates one more block"
            assert {states(reader.shown)[block] for block in blocks} == {2}
            async with engine.held_step():
                mock_clock.jump(0.03)
                if way == "by id":
                    engine.abort("r")
                else:
                    client.close()
                await wait_all_tasks_blocked()
                mock_clock.jump(0.02)
        await tick(reader, mock_clock)
        request = reader.shown["requests"]["r"]
        assert (request["state"], request["outcome"]) == ("finished", "cancelled")
        assert request["freed"] == {"blocks": 4, "steps": 1, "seconds": pytest.approx(0.02)}
        assert {states(reader.shown)[block] for block in blocks} == {0}


@pytest.mark.fake_engine(paused=True)
async def test_blocks_that_other_requests_share_are_not_shown_as_free(memory_server, mock_clock):
    engine = memory_server.engine
    body = {"prompt": "the same eight and more", "max_tokens": 9, "stream": True}
    async with (
        reading(memory_server) as reader,
        memory_server.client().ask(COMPLETIONS, body, headers={"x-request-id": "a"}),
    ):
        await engine.step()
        async with memory_server.client().ask(COMPLETIONS, body, headers={"x-request-id": "b"}):
            await engine.step()
            await tick(reader, mock_clock)
            a, b = (dict(reader.shown["requests"][name])["blocks"] for name in "ab")
            assert a[0][0] == b[0][0], "the requests share their first blocks"
        await tick(reader, mock_clock)
        freed = reader.shown["requests"]["b"]["freed"]
        assert 0 < freed["blocks"] < sum(count for _, count in b)


async def test_slow_page_reader_gets_one_change_for_all_missed_changes(memory_server, mock_clock):
    client, other = memory_server.client(), memory_server.client()
    async with client.ask(PATH) as response:
        reader = Reader(response)
        await reader.read()
        for _ in range(50):  # The client does not read: its window fills, and then the server waits.
            await other.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 2})
            mock_clock.jump(0.4)
        await reader.read()
        while True:
            before = len(reader.events)
            await tick(reader, mock_clock)
            if len(reader.events) == before:
                break
        async with reading(memory_server) as fresh:
            assert reader.shown["stats"]["steps_total"] == fresh.shown["stats"]["steps_total"]


async def test_the_number_of_readers_is_bounded_and_a_leaving_reader_frees_a_slot(mock_clock):
    page = PageSettings(readers_max=3, readers_of_one_max=2, history_seconds=0)
    async with open_memory_server(api_keys=("a", "b"), page=page) as server:
        for _ in range(3):
            async with reading(server, authorization="Bearer a"), reading(server, authorization="Bearer a"):
                refused = await server.client(headers={"authorization": "Bearer a"}).get(PATH)
                assert (refused.status, refused.headers["x-trioserve-reason"]) == (429, "too_many_readers")
                assert int(refused.headers["retry-after"]) > 0
                async with reading(server, authorization="Bearer b"):
                    assert (await server.client(headers={"authorization": "Bearer b"}).get(PATH)).status == 429
            await server.assert_all_free()
            assert server.app.page.reader_count == 0


async def test_a_key_sees_its_own_requests_and_the_admin_all_requests(mock_clock):
    access = AccessRules(metrics_need_key=True)
    for rules in (AccessRules(), access):
        async with open_memory_server(
            api_keys=("a", "b"), admin_api_key="boss", access=rules, paused=True, model=None
        ) as server:
            assert (await server.client().get(PATH)).status == 401
            a = server.client(headers={"authorization": "Bearer a", "x-tenant-id": "secret-tenant"})
            body = {"prompt": "hi", "max_tokens": 9, "stream": True}
            async with a.ask(COMPLETIONS, body, headers={"x-request-id": "of-a"}) as response:
                await server.engine.step()
                await response.head()
                async with reading(server, authorization="Bearer b") as other:
                    assert other.shown["requests"] == {}
                    assert (other.shown["request_count"], other.shown["server"]["sees"]) == (0, "own")
                    assert b"of-a" not in other.response.body
                    assert (other.shown["blocks"] is None) == rules.metrics_need_key
                    if rules.metrics_need_key:
                        assert set(other.shown["stats"]) == {
                            "blocks_free",
                            "blocks_cached",
                            "blocks_used",
                            "blocks_held",
                            "blocks_retired",
                        }
                        assert (other.shown["steps"], other.shown["history"]) == (None, None)
                async with reading(server, authorization="Bearer a") as own:
                    assert set(own.shown["requests"]) == {"of-a"}
                async with reading(server, authorization="Bearer boss") as admin:
                    assert set(admin.shown["requests"]) == {"of-a"}
                    assert admin.shown["server"]["sees"] == "all"
                    assert admin.shown["blocks"] is not None
                    tenant = admin.shown["requests"]["of-a"]["tenant"]
                    assert tenant.startswith("key-")
                    assert len(tenant) == len("key-") + 6


async def test_a_finished_request_of_another_key_is_not_shown(mock_clock):
    async with (
        open_memory_server(api_keys=("a", "b"), admin_api_key="boss") as server,
        reading(server, authorization="Bearer b") as other,
        reading(server, authorization="Bearer boss") as admin,
    ):
        a = server.client(headers={"authorization": "Bearer a", "x-request-id": "of-a"})
        await a.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
        await tick(admin, mock_clock)
        await other.read()
        assert set(admin.shown["requests"]) == {"of-a"}
        assert b"of-a" not in other.response.body


async def test_page_paths_do_not_exist_if_the_page_is_disabled(mock_clock):
    async with open_memory_server(page=PageSettings(is_shown=False)) as server:
        for path in ("/", "/ui/events", "/ui/page.css"):
            response = await server.client().get(path)
            assert (response.status, response.headers["x-trioserve-reason"]) == (404, "not_found")


async def test_the_page_has_a_strict_policy_and_unchanged_files_are_not_sent_again(memory_server):
    response = await memory_server.client().get("/")
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    again = await memory_server.client().get("/", headers={"if-none-match": response.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert (await memory_server.client().get("/router")).status == 404
    for path in ("/ui/page.html", "/ui/page.py", "/ui/nothing.js", "/ui/../page.py"):
        assert (await memory_server.client().get(path)).status == 404


@pytest.mark.parametrize("interval", ["0", "0.09", "10.5", "nan", "x", "1e9"])
async def test_interval_of_page_events_has_bounds(memory_server, interval):
    response = await memory_server.client().get(f"{PATH}?interval={interval}")
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "interval"


async def test_silent_stream_of_page_events_sends_keep_alives(memory_server, autojump_clock):
    async with memory_server.client().ask(PATH) as response:
        await response.head()
        with trio.move_on_after(3.1 * ALIVE_SECONDS):
            await response.read()
        assert response.body.count(b": keep-alive\n\n") == 3


async def test_the_last_event_shows_the_shutdown_and_the_stream_ends(memory_server, mock_clock):
    async with memory_server.client().ask(PATH + "?interval=10") as response:
        reader = Reader(response)
        await reader.read()
        memory_server.engine.drain()
        await reader.read()
        assert response.is_complete
        assert reader.shown["server"]["is_draining"] is True
    assert (await memory_server.client().get(PATH)).status == 503


async def test_server_keeps_no_data_for_the_page_while_no_client_reads_it(memory_server, mock_clock):
    feed = memory_server.engine.live_feed

    def kept() -> int:
        return sum(
            len(getattr(feed, name)) for name in ("_watched", "_keys", "_ended", "_outcomes", "_cancels", "_freed")
        )

    await memory_server.client().post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
    assert kept() == 0
    for _ in range(20):
        async with reading(memory_server) as reader:
            await memory_server.client().post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1})
            await tick(reader, mock_clock)
            assert kept() > 0
    await memory_server.assert_all_free()
    assert kept() == 0
    assert not memory_server.app.page._snapshots
    assert not memory_server.app.page._changes


async def test_requests_with_the_same_id_are_all_shown(memory_server, mock_clock):
    engine = memory_server.engine
    engine.pause()
    async with (
        engine.generate("a", request_id="same"),
        engine.generate("b", request_id="same"),
        reading(memory_server) as reader,
    ):
        assert [request["id"] for request in reader.shown["requests"].values()] == ["same", "same"]


@pytest.mark.fake_engine(step_seconds=0.01)
async def test_later_page_reader_gets_the_history(autojump_clock):
    async with open_memory_server(page=PageSettings(history_seconds=5), step_seconds=0.01) as server:
        await server.client().post(COMPLETIONS, {"prompt": "hi", "max_tokens": 100, "ignore_eos": True})
        await trio.sleep(11)
        async with server.client().ask(PATH) as response:
            reader = Reader(response)
            await response.head()
            with trio.move_on_after(1):
                await response.read()
            await reader.read()
        history = reader.shown["history"]
        assert history["series"]["tokens_per_second"][:2] == [20.0, 0.0]
        assert history["series"]["itl_p50"][1] is None
        assert 0.005 < history["series"]["itl_p50"][0] < 0.015


async def test_expensive_page_events_are_sent_less_often(autojump_clock):
    """The fake CPU clock advances by 10 ms at each reading. So an event costs 10 ms, and the pause is 2 s."""
    seconds = itertools.count(0.0, 0.01)
    async with open_memory_server(step_seconds=0.05) as server:
        settings = PageSettings(history_seconds=0)
        page = Page(lambda: server.engine.live_feed, settings, cpu_clock=lambda: next(seconds))
        services = server.app.services
        parts = dataclasses.replace(services.server, page=page)
        server.app.services = dataclasses.replace(services, server=parts)
        async with server.client().ask(PATH) as response:
            await response.head()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.client().post, COMPLETIONS, {"prompt": "hi", "max_tokens": 100})
                with trio.move_on_after(6.5):
                    await response.read()
                nursery.cancel_scope.cancel()
            assert response.body.count(b"event: change") == 3
