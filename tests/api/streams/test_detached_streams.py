"""Tests streams that continue without their client. Each event is delivered exactly once, and limits hold."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.limits import DetachSettings
from trioserve.http.limits import FrontendLimits
from trioserve.testing.memory_client import ConnectionLost
from trioserve.testing.memory_server import open_memory_server

TEXT = "Hello, all of you!"
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
APIS = {
    "chat": CHAT,
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
    "messages": ("/v1/messages", {"max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
}
SETTINGS = DetachSettings(seconds_max=60, streams_max=4, streams_of_one_max=2)


@asynccontextmanager
async def opened(*, settings=SETTINGS, **options):
    options = {"response": TEXT, "max_model_len": 2048, "block_count": 1024, "paused": True, **options}
    async with open_memory_server(detaching=settings, **options) as server:
        yield server
        await server.assert_all_free()


def request_stream(server, *, api="chat", session="s1", seconds="30", key=None, **fields):
    path, body = APIS[api]
    headers = {"x-session-id": session, "x-detach-timeout": seconds, **authorization(key)}
    return server.client().ask(path, {"model": "fake", "stream": True, **body, **fields}, headers=headers)


def authorization(key):
    return {} if key is None else {"authorization": f"Bearer {key}"}


def resume_stream(server, after=0, *, session="s1", key=None, **headers):
    query = f"?after={after}" if after is not None else ""
    return server.client().ask(f"/v1/streams/{session}{query}", headers={**authorization(key), **headers})


def numbered(raw):
    """Return the complete events by number. Check that each event was received once and in order."""
    events = {}
    for block in raw.split(b"\n\n")[:-1]:
        if block.startswith(b":"):
            continue
        line, _, rest = block.partition(b"\n")
        number = int(re.fullmatch(rb"id: (\d+)", line)[1])
        assert number not in events
        assert not events or number == max(events) + 1
        events[number] = rest
    return events


async def whole_of(api):
    """Return the events of an uninterrupted stream of the same request."""
    async with opened(paused=False) as server, request_stream(server, api=api, seconds="1") as response:
        await response.read()
        await trio.sleep(2)
        return numbered(response.body)


def comparable(events):
    """Return events without ids and times, which differ between responses."""
    raw = b"\n\n".join(rest for _number, rest in sorted(events.items()))
    return re.sub(rb'"(id|item_id|created|created_at|completed_at)":\s*("[^"]*"|\d+)', b"", raw)


def ollama_text(events):
    values = [json.loads(rest.removeprefix(b"data: ")) for _number, rest in sorted(events.items())]
    assert [value["done"] for value in values] == [False] * (len(values) - 1) + [True]
    return "".join(value["message"]["content"] for value in values)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_returning_client_of_a_detached_stream_gets_each_event_once(autojump_clock, api, steps):
    expected = await whole_of(api)
    async with opened() as server:
        async with request_stream(server, api=api) as response:
            await server.engine.step(steps)
            await response.head()
            await wait_all_tasks_blocked()
            with trio.move_on_after(0.1):
                await response.read()
            events = numbered(response.body)
        await server.engine.step(3)  # No client is connected during these steps.
        assert server.app.detached.detached_count == 1
        async with resume_stream(server, max(events, default=0)) as response:
            server.engine.resume()
            await response.read()
        later = numbered(response.body)
        assert min(later) == max(events, default=0) + 1
        joined = events | later
        assert sorted(joined) == list(range(1, len(joined) + 1))
        if api == "ollama":
            assert ollama_text(joined) == ollama_text(expected) == TEXT
        elif api != "completions":  # The resumed events of text completions may split the same text at other positions.
            assert comparable(joined)[-200:] == comparable(expected)[-200:]
        await trio.sleep(31)
        assert server.app.detached.kept_count == 0


async def test_client_that_leaves_cancels_a_stream_without_detach_headers(autojump_clock):
    async with opened(response=None) as server:
        path, body = CHAT
        async with server.client().ask(path, {"model": "fake", "stream": True, **body}) as response:
            await server.engine.step(3)
            await response.head()
        await server.engine.step()
        await server.assert_all_free()


@pytest.mark.parametrize("steps", [0, 1])
async def test_client_that_leaves_before_its_stream_begins_cancels_the_stream(autojump_clock, steps):
    async with opened(response=None, max_num_seqs=1) as server:
        async with request_stream(server, session="first"):
            await server.engine.step(2)
            async with request_stream(server):
                await wait_all_tasks_blocked()
                async with resume_stream(server) as early:
                    assert await early.head() == 409
                await server.engine.step(steps)
            await wait_all_tasks_blocked()
            async with resume_stream(server) as response:
                assert await response.head() == 404
        async with server.client().ask("/v1/streams/first", method="DELETE") as response:
            await server.engine.step()
            assert (await response.json())["deleted"]


async def test_whole_response_is_never_kept_without_its_client(autojump_clock):
    async with opened(response=None) as server:
        async with request_stream(server, stream=False):
            await server.engine.step(3)
        await server.engine.step()
        await server.assert_all_free()
        assert server.app.detached.kept_count == 0


async def test_error_before_the_stream_begins_has_its_own_status(autojump_clock):
    async with opened() as server:
        async with request_stream(server, temperature=-1) as response:
            assert await response.head() == 400
            assert (await response.json())["error"]["param"] == "temperature"
        assert server.app.detached.kept_count == 0


async def test_detached_stream_ends_after_its_time_without_a_reader(autojump_clock):
    async with opened(response=None, paused=False, step_seconds=1) as server:
        async with request_stream(server, seconds="10") as response:
            await response.head()
            await trio.sleep(5)
        await trio.sleep(9)
        assert server.app.detached.detached_count == 1
        async with resume_stream(server, 2) as response:  # The time limit restarts when this reader leaves.
            await response.head()
            await trio.sleep(20)
        await trio.sleep(9)
        assert server.app.detached.detached_count == 1
        await trio.sleep(3)
        assert server.app.detached.kept_count == 0
        await server.assert_all_free()
        async with resume_stream(server, 2) as response:
            assert await response.head() == 404


async def test_complete_stream_can_be_read_again_until_its_time_has_passed(autojump_clock):
    async with opened(paused=False) as server:
        async with request_stream(server) as response:
            await response.read()
        events = numbered(response.body)
        assert events[max(events)] == b"data: [DONE]"
        async with resume_stream(server, max(events) - 2) as response:
            await response.read()
        assert list(numbered(response.body)) == [max(events) - 1, max(events)]
        async with resume_stream(server, None, **{"last-event-id": str(max(events) - 1)}) as response:
            await response.read()
        assert list(numbered(response.body)) == [max(events)]
        await trio.sleep(29)
        assert server.app.detached.kept_count == 1
        await trio.sleep(2)
        assert server.app.detached.kept_count == 0


async def test_second_reader_of_a_stream_replaces_the_first(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as first:
            await server.engine.step(3)
            await first.head()
            async with resume_stream(server) as second:
                await wait_all_tasks_blocked()
                server.engine.resume()
                await second.read()
            await first.read()
        assert b"stream_taken_over" in first.body
        assert b"[DONE]" not in first.body
        events = numbered(second.body)
        assert sorted(events) == list(range(1, len(events) + 1))
        await trio.sleep(31)


@pytest.mark.parametrize("api", APIS)
async def test_deleting_a_stream_frees_all_blocks_and_ends_the_reader(autojump_clock, api):
    async with opened(response=None) as server:
        async with request_stream(server, api=api) as reader:
            await server.engine.step(3)
            await reader.head()
            async with trio.open_nursery() as nursery:

                async def delete():
                    async with server.client().ask("/v1/streams/s1", method="DELETE") as response:
                        assert (await response.json()) == {"id": "s1", "object": "stream", "deleted": True}

                nursery.start_soon(delete)
                await server.engine.step()
            await server.engine.step()
            await reader.read()
        assert b"ended before its response was complete" in reader.body
        numbered(reader.body)
        assert server.app.detached.kept_count == 0


async def test_another_caller_can_neither_read_nor_delete_a_stream(autojump_clock):
    async with opened(api_keys=("a", "b"), response=None) as server:
        async with request_stream(server, key="a") as response:
            await server.engine.step(3)
            await response.head()
        async with resume_stream(server, key="b") as response:
            assert await response.head() == 404
        async with server.client().ask("/v1/streams/s1", method="DELETE", headers=authorization("b")) as response:
            assert await response.head() == 404
        assert server.app.detached.detached_count == 1
        async with request_stream(server, key="b") as response:  # Another key can use the same name for another stream.
            await server.engine.step(3)
            assert await response.head() == 200
        await wait_all_tasks_blocked()
        assert server.app.detached.detached_count == 2
        await trio.sleep(61)
        await server.engine.step()


async def test_stream_id_can_be_reused_only_after_the_stream_has_finished(autojump_clock):
    async with opened() as server:
        async with request_stream(server) as response:
            await server.engine.step(2)
            await response.head()
        async with request_stream(server) as response:
            assert await response.head() == 409
            assert (await response.json())["error"]["code"] == "stream_exists"
        server.engine.resume()
        await wait_all_tasks_blocked()
        async with request_stream(server) as response:
            assert await response.head() == 200
            await response.read()
        await trio.sleep(31)


async def test_number_of_detached_streams_is_limited_in_total_and_per_caller(autojump_clock):
    async with opened(api_keys=("a", "b", "c"), response=None, max_num_seqs=8) as server:
        for number, key in enumerate("aabb"):
            async with request_stream(server, session=f"s{number}", key=key) as response:
                await server.engine.step(2)
                assert await response.head() == 200
            for other in "abc" if number == 3 else key if number == 1 else "":
                async with request_stream(server, session="more", key=other) as response:
                    assert await response.head() == 429
                    assert response.headers["x-trioserve-reason"] == "detached_full"
        await trio.sleep(31)
        await server.engine.step()


async def test_finished_streams_are_removed_for_new_streams(autojump_clock):
    async with opened(paused=False) as server:
        for number in range(5):
            async with request_stream(server, session=f"s{number}") as response:
                assert await response.head() == 200
                await response.read()
        assert server.app.detached.kept_count == 2
        await trio.sleep(31)


async def test_unread_events_beyond_the_limit_end_the_request(autojump_clock):
    settings = DetachSettings(seconds_max=60, bytes_max=4000)
    async with opened(settings=settings, response=None, paused=False, step_seconds=0.01) as server:
        async with request_stream(server) as response:
            await response.head()
            await trio.sleep(0.05)
        await trio.sleep(20)
        await server.assert_all_free()
        assert server.app.detached.kept_bytes < 5000
        async with resume_stream(server, server.app.detached.find("s1", None).log.first_kept - 1) as response:
            await response.read()
        events = numbered(response.body)
        assert b"stream_buffer_full" in events[max(events)]
        shown = (await server.client().get("/metrics")).body.decode()
        assert re.search(r"trioserve:detached_streams\{.*\} 0", shown)
        assert re.search(r"trioserve:detached_bytes_held\{.*\} [1-9]", shown)
        await trio.sleep(31)


async def test_fast_reader_can_read_more_than_the_size_limit(autojump_clock):
    settings = DetachSettings(seconds_max=60, bytes_max=4000)
    async with opened(settings=settings, response=None, paused=False, step_seconds=0.01) as server:
        async with request_stream(server, max_tokens=200) as response:
            await response.read()
        events = numbered(response.body)
        assert events[max(events)] == b"data: [DONE]"
        assert len(response.body) > 8000
        async with resume_stream(server, 1) as response:
            assert await response.head() == 410
            assert (await response.json())["error"]["code"] == "events_gone"
        async with resume_stream(server, max(events) + 1) as response:
            assert await response.head() == 400
        await trio.sleep(31)


@pytest.mark.slow
async def test_stream_waits_for_a_slow_reader_until_it_counts_as_gone(autojump_clock):
    settings = DetachSettings(seconds_max=60, bytes_max=20_000)
    limits = FrontendLimits(stall_seconds_max=5, stream_buffer_bytes_max=2048)
    options = {"step_seconds": 0.01, "max_model_len": 1000, "limits": limits}
    async with opened(settings=settings, response=None, paused=False, **options) as server:
        async with request_stream(server) as response:
            await response.head()
            await trio.sleep(6)  # The client reads nothing during this time.
            stream = server.app.detached.find("s1", None)
            assert stream.has_reader
            assert 10_000 < stream.log.unread_byte_count < 11_000
            await trio.sleep(8)
            # The stream had no reader, and its events exceeded the size limit.
            assert server.app.detached.detached_count == 0
            assert not stream.has_reader
            with pytest.raises(ConnectionLost):
                await response.read()
        async with resume_stream(server, stream.log.first_kept - 1) as response:
            await response.read()
        assert b"stream_buffer_full" in response.body
        await trio.sleep(61)
        await server.assert_all_free()


async def test_drain_ends_unread_streams_and_finishes_read_streams(autojump_clock):
    async with opened(api_keys=("a", "b")) as server:
        async with request_stream(server, key="a") as response:
            await server.engine.step(2)
            await response.head()
        async with request_stream(server, key="b") as reader:
            await server.engine.step(2)
            await reader.head()
            server.drain()
            await server.engine.step()
            assert server.app.detached.kept_count == 1
            server.engine.resume()
            await reader.read()
        assert b"[DONE]" in reader.body
        await server.app.wait_until_idle()
        assert server.app.detached.kept_count == 0


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-detach-timeout": "0", "x-session-id": "s"}, "X-Detach-Timeout"),
        ({"x-detach-timeout": "61", "x-session-id": "s"}, "X-Detach-Timeout"),
        ({"x-detach-timeout": "nan", "x-session-id": "s"}, "X-Detach-Timeout"),
        ({"x-detach-timeout": "soon", "x-session-id": "s"}, "X-Detach-Timeout"),
        ({"x-detach-timeout": "5"}, "X-Session-Id"),
        ({"x-detach-timeout": "5", "x-session-id": "a/b"}, "X-Session-Id"),
        ({"x-detach-timeout": "5", "x-session-id": "a" * 129}, "X-Session-Id"),
    ],
)
async def test_invalid_detach_headers_are_refused(autojump_clock, headers, param):
    async with opened() as server:
        path, body = CHAT
        response = await server.client().post(path, {"model": "fake", "stream": True, **body}, headers=headers)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_detaching_is_refused_by_default(autojump_clock):
    async with opened(settings=DetachSettings()) as server, request_stream(server) as response:
        assert await response.head() == 400
        assert "--detach-timeout-max" in (await response.json())["error"]["message"]
