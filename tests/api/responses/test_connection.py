"""Tests responses on a websocket connection: events, lanes, kept responses, limits, and what a client that leaves
frees.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
import trio

from trioserve.api.limits import ConnectionSettings
from trioserve.api.responses.response_types import ResponseEvent
from trioserve.http.limits import FrontendLimits
from trioserve.testing.memory_server import MemoryServer, MemoryWebSocket, WebSocketClosed, open_memory_server

PATH = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Agent:
    """Client of one connection."""

    def __init__(self, socket: MemoryWebSocket) -> None:
        self.socket = socket

    async def send(self, message: Any) -> None:
        await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def create(self, text: Any = "Hi", **fields: Any) -> None:
        await self.send({"type": "response.create", "model": "fake", "input": text, "store": False, **fields})

    async def next(self) -> dict[str, Any]:
        message = await self.socket.receive()
        assert isinstance(message, str)
        event: dict[str, Any] = json.loads(message)
        if event["type"] != "error" and not event["type"].startswith("response.steer."):
            msgspec.convert({name: value for name, value in event.items() if name != "stream_id"}, ResponseEvent)
        return event

    async def until(self, *kinds: str, lane: str | None = None) -> dict[str, Any]:
        while True:
            event = await self.next()
            if event["type"] in kinds and event.get("stream_id") == lane:
                return event

    async def response(self, lane: str | None = None) -> Any:
        ends = ("response.completed", "response.incomplete", "response.failed")
        return (await self.until(*ends, lane=lane))["response"]

    async def ask(self, text: Any = "Hi", **fields: Any) -> Any:
        await self.create(text, **fields)
        return await self.response(fields.get("stream_id"))

    async def error(self) -> dict[str, Any]:
        event = await self.next()
        assert event["type"] == "error", event
        return event

    async def refused(self, text: Any = "Hi", **fields: Any) -> Any:
        await self.create(text, **fields)
        return (await self.error())["error"]


@asynccontextmanager
async def connected(server: MemoryServer, key: str | None = None) -> AsyncIterator[Agent]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with server.websocket(PATH, headers=headers) as socket:
        yield Agent(socket)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[MemoryServer]:
    options = {"response": "Hello!", "max_model_len": 2048, "block_count": 1024, **options}
    async with open_memory_server(**options) as server:
        yield server
        await server.assert_all_free()
        assert server.app.connections.memory.byte_count == 0


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_events_on_a_websocket_are_those_of_a_stream(autojump_clock):
    async with opened() as server, connected(server) as agent:
        await agent.create(stream=True)
        events = [await agent.next()]
        while events[-1]["type"] != "response.completed":
            events.append(await agent.next())
        async with server.client().ask(
            PATH, {"model": "fake", "input": "Hi", "stream": True, "store": False}
        ) as response:
            streamed = [event async for event in response]
        # How many deltas carry the text depends on the time.
        assert list(dict.fromkeys(e["type"] for e in events)) == list(dict.fromkeys(e["type"] for e in streamed))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert text_of(events[-1]["response"]) == "Hello!"
        assert all("stream_id" not in event for event in events)


async def test_a_connection_continues_its_responses_without_the_store(autojump_clock):
    seen: list[str] = []
    async with opened(response=lambda text: seen.append(text) or f"r{len(text)}") as server:
        async with connected(server) as agent:
            first = await agent.ask("one", instructions="not carried over")
            second = await agent.ask("two", previous_response_id=first["id"])
            third = await agent.ask("three", previous_response_id=second["id"])
            history = f"user: one\nassistant: {text_of(first)}\nuser: two\nassistant: {text_of(second)}\n"
            assert seen[-1] == f"{history}user: three\nassistant: "
            # An earlier response and an item of it are still known.
            reference = {"type": "item_reference", "id": second["output"][0]["id"]}
            await agent.ask([reference], previous_response_id=first["id"])
            assert seen[-1] == f"user: one\nassistant: {text_of(first)}\nassistant: {text_of(second)}\nassistant: "
        async with connected(server) as agent:
            error = await agent.refused("four", previous_response_id=third["id"])
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_new_connection_continues_a_stored_response(autojump_clock):
    seen: list[str] = []
    async with opened(response=lambda text: seen.append(text) or "ok") as server:
        async with connected(server) as agent:
            stored = await agent.ask("one", store=True)
        async with connected(server) as agent:
            second = await agent.ask("two", previous_response_id=stored["id"])
            await agent.ask("three", previous_response_id=second["id"])
            assert seen[-1] == "user: one\nassistant: ok\nuser: two\nassistant: ok\nuser: three\nassistant: "


async def test_a_connection_is_a_session_of_the_engine(autojump_clock):
    async with opened() as server:
        async with connected(server) as agent:
            first = await agent.ask("one")
            await agent.ask("two", previous_response_id=first["id"], stream_id="a")
            [session] = server.engine.sessions
            assert session.turn_count == 2
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.engine.sessions) == 0


async def test_a_failed_turn_does_not_remove_the_response_that_it_continues(autojump_clock):
    async with opened() as server, connected(server) as agent:
        first = await agent.ask("one")
        assert (await agent.refused("two", previous_response_id=first["id"], temperature=-1))["param"] == "temperature"
        assert (await agent.ask("two", previous_response_id=first["id"]))["status"] == "completed"


async def test_warm_up_computes_the_prompt_and_generates_nothing(autojump_clock):
    seen: list[str] = []
    async with opened(response=lambda text: seen.append(text) or "ok") as server, connected(server) as agent:
        warm = await agent.ask("x" * 200, instructions="Be brief.", generate=False)
        assert (warm["status"], warm["output"]) == ("completed", [])
        usage = warm["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (len(f"system: Be brief.\nuser: {'x' * 200}\n"), 0)
        response = await agent.ask("Hi", instructions="Be brief.", previous_response_id=warm["id"])
        assert seen[-1] == f"system: Be brief.\nuser: {'x' * 200}\nuser: Hi\nassistant: "
        cached = response["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= 200
        assert text_of(response) == "ok"


async def test_lanes_run_side_by_side_and_one_lane_in_order(autojump_clock):
    async with opened(step_seconds=0.01) as server, connected(server) as agent:
        for lane, text in (("a", "one"), ("a", "two"), ("b", "three")):
            await agent.create(text, stream_id=lane)
        events: list[dict[str, Any]] = []
        while sum(event["type"] == "response.completed" for event in events) < 3:
            events.append(await agent.next())
        of_lane = {lane: [e["type"] for e in events if e["stream_id"] == lane] for lane in ("a", "b")}
        assert of_lane["a"] == 2 * of_lane["b"]
        ends = [event["stream_id"] for event in events if event["type"] == "response.completed"]
        assert ends == ["a", "b", "a"]


async def test_a_response_forks_to_another_lane(autojump_clock):
    seen: list[str] = []
    async with opened(response=lambda text: seen.append(text) or "ok") as server, connected(server) as agent:
        first = await agent.ask("one", stream_id="main")
        await agent.create("left", previous_response_id=first["id"], stream_id="main")
        await agent.create("right", previous_response_id=first["id"], stream_id="critic")
        ended: set[str] = set()
        while ended != {"main", "critic"}:
            event = await agent.next()
            if event["type"] == "response.completed":
                ended.add(event["stream_id"])
        assert sorted(text.split("user: ")[-1] for text in seen[1:]) == ["left\nassistant: ", "right\nassistant: "]


async def test_responses_above_the_limit_wait(autojump_clock):
    settings = ConnectionSettings(running_max=2)
    async with opened(connections=settings, step_seconds=0.01) as server, connected(server) as agent:
        for lane in "abc":
            await agent.create(stream_id=lane)
        ends: list[str] = []
        begun: list[str] = []
        while len(ends) < 3:
            event = await agent.next()
            if event["type"] == "response.created":
                begun.append(event["stream_id"])
                assert len(begun) <= len(ends) + 2
            if event["type"] == "response.completed":
                ends.append(event["stream_id"])
        assert begun[2] == "c"


@pytest.mark.parametrize("lane", ["", "a b", "x" * 257, 5, "é"])
async def test_invalid_lane_is_refused(autojump_clock, lane):
    async with opened() as server, connected(server) as agent:
        await agent.create(stream_id=lane)
        event = await agent.error()
        assert (event["status"], event["error"]["code"]) == (400, "invalid_stream_id")
        assert "stream_id" not in event


async def test_number_of_lanes_is_limited(autojump_clock):
    async with opened(connections=ConnectionSettings(lanes_max=2)) as server, connected(server) as agent:
        for lane in ("a", "b", None):
            assert (await agent.ask(stream_id=lane))["status"] == "completed"
        await agent.create(stream_id="c")
        event = await agent.error()
        assert (event["error"]["code"], event["stream_id"]) == ("websocket_stream_limit_reached", "c")
        assert (await agent.ask(stream_id="a"))["status"] == "completed"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("not json", None),
        ("[1]", None),
        ("", None),
        (b"{}", None),
        ("{}", "type"),
        ({"type": "response.unknown"}, "type"),
        ({"type": "response.create"}, "model"),
        ({"type": "response.create", "model": "fake"}, "input"),
        ({"type": "response.create", "model": "other", "input": "Hi"}, "model"),
        ({"type": "response.create", "model": "fake", "input": "Hi", "background": True}, "background"),
        (
            {
                "type": "response.create",
                "model": "fake",
                "input": "Hi",
                "resume": {"token_ids": [[1]], "finished": [False]},
            },
            "resume",
        ),
        ({"type": "response.cancel"}, "response_id"),
        ({"type": "response.cancel", "response_id": "resp_other"}, "response_id"),
    ],
)
async def test_a_bad_message_gets_an_error_and_the_connection_continues(autojump_clock, message, param):
    async with opened() as server, connected(server) as agent:
        await agent.send(message)
        event = await agent.error()
        assert 400 <= event["status"] < 500
        assert event["error"]["param"] == param
        assert event["sequence_number"] == 0
        assert (await agent.ask())["status"] == "completed"


async def test_acknowledged_response_gets_no_answer(autojump_clock):
    async with opened() as server, connected(server) as agent:
        response = await agent.ask()
        await agent.send({"type": "response.processed", "response_id": response["id"]})
        assert (await agent.ask())["status"] == "completed"


async def test_too_many_waiting_responses_are_refused(autojump_clock):
    settings = ConnectionSettings(waiting_max=2)
    async with opened(connections=settings) as server, connected(server) as agent:
        await server.engine.pause_generation("keep")
        for _ in range(4):
            await agent.create()
        event = await agent.error()
        assert event["status"] == 429
        assert event["headers"] == event["error"]["headers"]
        assert event["headers"]["x-trioserve-reason"] == "connection_queue_full"
        server.engine.resume_generation()
        for _ in range(3):
            assert (await agent.response())["status"] == "completed"


async def test_response_is_refused_while_too_many_requests_run(autojump_clock):
    limits = FrontendLimits(exchanges_max=1)
    async with (
        opened(limits=limits, response="x" * 500, step_seconds=0.01) as server,
        connected(server) as first,
        connected(server) as second,
    ):
        await first.create()
        await first.until("response.created")
        assert server.server.counters().exchanges_open == 1
        await second.create()
        assert (await second.error())["headers"]["x-trioserve-reason"] == "exchanges_max"
        await first.send({"type": "response.cancel"})
        await first.response()
        assert (await second.ask())["status"] == "completed"


async def test_queued_response_keeps_an_idle_connection_open(autojump_clock):
    limits = FrontendLimits(websocket_idle_seconds_max=60)
    async with opened(limits=limits) as server, connected(server) as agent:
        await server.engine.pause_generation("keep")
        await agent.create()
        with trio.move_on_after(200):
            await agent.next()
        server.engine.resume_generation()
        assert (await agent.response())["status"] == "completed"
        ended_at = trio.current_time()
        closed = await agent.socket.closed()
        assert (closed.code, closed.reason) == (1001, "no message for 60 seconds")
        assert trio.current_time() - ended_at == pytest.approx(60, abs=0.3)


async def test_cancel_ends_a_response_and_frees_its_blocks(autojump_clock):
    async with opened(response="x" * 500, step_seconds=0.01) as server, connected(server) as agent:
        await agent.create(stream_id="a")
        created = await agent.until("response.created", lane="a")
        await agent.until("response.output_text.delta", lane="a")
        await agent.send({"type": "response.cancel", "response_id": created["response"]["id"]})
        end = await agent.until("response.incomplete", lane="a")
        assert end["response"]["status"] == "cancelled"
        await server.engine.finish_step()
        server.engine.assert_all_free()
        error = await agent.refused("two", previous_response_id=created["response"]["id"], stream_id="a")
        assert error["code"] == "previous_response_not_found"
        assert (await agent.ask(max_output_tokens=3, stream_id="a"))["status"] == "incomplete"


async def test_cancel_ends_a_queued_response(autojump_clock):
    async with opened(response="x" * 500) as server, connected(server) as agent:
        await server.engine.pause_generation("keep")
        await agent.create()
        await trio.testing.wait_all_tasks_blocked()
        await agent.send({"type": "response.cancel"})
        assert [(await agent.next())["type"] for _ in range(2)] == ["response.created", "response.in_progress"]
        assert (await agent.response())["status"] == "cancelled"
        server.engine.resume_generation()


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.05, 0.5])
async def test_blocks_of_a_client_that_leaves_are_free_one_step_later(autojump_clock, seconds):
    async with opened(response="x" * 500, step_seconds=0.01) as server:
        async with connected(server) as agent:
            for lane in "abcd":
                await agent.create("y" * 100, stream_id=lane)
            await trio.sleep(seconds)
            agent.socket.leave()
        await server.assert_all_free()


@pytest.mark.slow
async def test_a_storm_of_clients_that_leave_frees_everything(autojump_clock):
    async with opened(response="x" * 50, step_seconds=0.01, block_count=4096) as server:

        async def visit(index: int) -> None:
            async with connected(server) as agent:
                if index % 3 == 0:
                    await agent.create("one", stream_id="a")
                    await agent.until("response.completed", "error", lane="a")
                for lane in "abc"[: 1 + index % 3]:
                    await agent.create("two", stream_id=lane)
                await trio.sleep((index * 37 % 200) / 100)
                if index % 5 == 0:
                    await agent.send({"type": "response.cancel", "stream_id": "a"})
                    await trio.sleep(0.01)
                agent.socket.leave()

        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(visit, index)
        await server.assert_all_free()
        assert server.app.connections.memory.byte_count == 0


async def test_a_drain_closes_an_idle_connection(autojump_clock):
    async with opened() as server, connected(server) as agent:
        await agent.ask()
        server.announce_drain()
        assert (await agent.socket.closed()).code == 1001


async def test_a_drain_lets_a_running_response_finish(autojump_clock):
    async with opened(response="x" * 50, step_seconds=0.01) as server, connected(server) as agent:
        await agent.create()
        await agent.until("response.output_text.delta")
        server.announce_drain()
        await agent.create(stream_id="late")
        assert (await agent.until("error", lane="late"))["error"]["code"] == "draining"
        assert text_of(await agent.response()) == "x" * 50
        closed = await agent.socket.closed()
        assert (closed.code, closed.reason) == (1001, "the server is shutting down: open a new connection")


async def test_age_of_a_connection_is_limited(autojump_clock):
    settings = ConnectionSettings(seconds_max=10)
    options: dict[str, Any] = {"connections": settings, "response": "x" * 500, "step_seconds": 0.1}
    async with opened(**options) as server, connected(server) as agent:
        await trio.sleep(9)
        await agent.create()
        await agent.create("waits for its lane")
        await trio.sleep(2)
        await agent.create(stream_id="late")
        code = "websocket_connection_limit_reached"
        assert (await agent.until("error"))["error"]["code"] == code
        assert (await agent.until("error", lane="late"))["error"]["code"] == code
        assert (await agent.response())["status"] == "completed"
        event = await agent.error()
        assert (event["status"], event["error"]["code"]) == (400, code)
        assert (await agent.socket.closed()).code == 1001


async def test_memory_of_a_connection_is_limited(autojump_clock):
    settings = ConnectionSettings(kept_max=2)
    async with opened(connections=settings) as server, connected(server) as agent:
        ids = [(await agent.ask("one"))["id"] for _ in range(3)]
        assert (await agent.refused(previous_response_id=ids[0]))["code"] == "previous_response_not_found"
        assert (await agent.ask(previous_response_id=ids[1]))["status"] == "completed"
        # The response that was used least recently is gone.
        assert (await agent.refused(previous_response_id=ids[2]))["code"] == "previous_response_not_found"
        assert (await agent.ask(previous_response_id=ids[1]))["status"] == "completed"


async def test_each_response_is_counted_as_a_request_of_its_caller(autojump_clock):
    async with opened(api_keys=("one", "two")) as server:
        async with connected(server, "one") as agent:
            stored = await agent.ask(store=True)
            await agent.refused(temperature=-1)
        async with connected(server, "two") as agent:
            error = await agent.refused(previous_response_id=stored["id"])
            assert error["code"] == "previous_response_not_found"
        text = server.engine.metrics.expose().decode()
        assert 'handler="/v1/responses",method="POST",status="2xx"} 1' in text
        assert 'handler="/v1/responses",method="POST",status="4xx"} 2' in text
        assert 'handler="/v1/responses",method="GET"' not in text


LEFT = (trio.BrokenResourceError, trio.ClosedResourceError, WebSocketClosed)


async def visit(server: MemoryServer, rng: random.Random) -> None:
    """Open a connection, take some turns, and leave in some phase and way."""
    await trio.sleep(rng.random() * 20)
    async with connected(server) as agent:
        with trio.move_on_after(rng.random() * 2), suppress(*LEFT):
            previous = None
            for _ in range(rng.randrange(4)):
                await agent.create("Hi", previous_response_id=previous, stream_id=rng.choice((None, "a")))
                if rng.random() < 0.2:
                    await agent.send({"type": "response.cancel"})
                elif rng.random() < 0.8:
                    event = await agent.until(*ENDS, lane=None)
                    previous = event.get("response", {}).get("id")
                await trio.sleep(rng.random())
        with suppress(*LEFT):
            match rng.randrange(4):
                case 0:
                    await agent.socket.close()
                case 1:
                    agent.socket.abort()
                case 2:
                    await agent.socket.half_close()


@pytest.mark.parametrize("client_count", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_websocket_clients_that_disconnect_in_any_phase_leak_nothing(autojump_clock, client_count):
    options = {"response": "x" * 40, "step_seconds": 0.01, "max_num_seqs": 16}
    limits = FrontendLimits(exchanges_max=64, websockets_max=client_count)
    async with opened(**options, limits=limits) as server:
        rng = random.Random(client_count)
        async with trio.open_nursery() as nursery:
            for _ in range(client_count):
                nursery.start_soon(visit, server, random.Random(rng.random()))
        await server.assert_all_free()
        counters = server.server.counters()
        assert counters.websockets_total == client_count
        assert counters.websocket_messages_received_total > client_count
        assert (server.connection_count, counters.connections_open, list(server.engine.sessions)) == (0, 0, [])
        assert counters.exchanges_failed_total == counters.connections_failed_total == 0
