"""Tests the Responses API over websockets through a router: the conversation, endpoints that break, and what leaving
frees.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.limits import ConnectionSettings
from trioserve.proxy import response_turn
from trioserve.testing.memory_server import MemoryWebSocket, WebSocketClosed

PATH = "/v1/responses"
ENGINE = {"response": "Hello!", "max_model_len": 2048, "block_count": 1024}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def create(socket: MemoryWebSocket, text: Any = "Hi", **fields: Any) -> None:
    message = {"type": "response.create", "model": "fake", "input": text, "store": False, **fields}
    await socket.send(json.dumps(message))


async def until(socket: MemoryWebSocket, *kinds: str) -> Any:
    while True:
        event = json.loads(await socket.receive())
        if event["type"] in kinds:
            return event


async def ask(socket: MemoryWebSocket, text: Any = "Hi", **fields: Any) -> Any:
    await create(socket, text, **fields)
    return await until(socket, *ENDS)


async def steer(socket: MemoryWebSocket, response_id: str, given: Any = "Shorter!") -> None:
    await socket.send(json.dumps({"type": "response.steer", "previous_response_id": response_id, "input": given}))


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.fixture
def open_router(open_setup):
    @asynccontextmanager
    async def opened(*, engine: dict[str, Any] | None = None, **options: Any):
        async with open_setup(engine=ENGINE | (engine or {}), **options) as setup:
            yield setup
            await setup.assert_all_free()

    return opened


async def test_events_are_those_of_an_endpoint(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        await create(socket)
        kinds = []
        while not kinds or kinds[-1] != "response.completed":
            event = json.loads(await socket.receive())
            assert event["sequence_number"] == len(kinds)
            kinds.append(event["type"])
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert "response.output_text.delta" in kinds
        assert text_of(event["response"]) == "Hello!"


async def test_second_turn_has_the_first_one_in_its_prompt_and_runs_at_the_same_endpoint(open_router):
    async with open_router(policy="round_robin") as setup, setup.router.websocket(PATH) as socket:
        first = (await ask(socket, "Who are you?"))["response"]
        tokens = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        second = (await ask(socket, "And now?", previous_response_id=first["id"]))["response"]
        assert second["usage"]["input_tokens"] > tokens
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        assert [server.engine.stats().steps_total > 0 for server in setup.servers.values()].count(True) == 1


async def test_conversation_continues_at_another_endpoint_if_its_endpoint_is_gone(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        first = (await ask(socket, "Who are you?"))["response"]
        [home] = [id for id, server in setup.servers.items() if server.engine.stats().steps_total]
        setup.unreachable.add(home)
        await setup.servers[home].hang_up()
        second = (await ask(socket, "And now?", previous_response_id=first["id"]))["response"]
        assert second["status"] == "completed"
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]


async def test_response_resumes_at_another_endpoint_if_its_endpoint_breaks(open_router):
    async with (
        open_router(engine={"paused": True}, failures_max=1_000_000, continuations_per_second_max=1e6) as setup,
        setup.router.websocket(PATH) as socket,
    ):
        await create(socket)
        await wait_all_tasks_blocked()
        [first] = [id for id, count in setup.leases().items() if count]
        [other] = [id for id in setup.servers if id != first]
        await setup.servers[first].engine.step(3)
        await wait_all_tasks_blocked()
        await setup.servers[first].hang_up()
        setup.servers[other].engine.resume()
        with trio.fail_after(5):
            event = await until(socket, *ENDS)
        assert event["type"] == "response.completed"
        assert text_of(event["response"]) == "Hello!"
        setup.servers[first].engine.resume()


async def test_client_that_leaves_frees_its_lease_and_the_blocks_of_its_endpoint(open_router):
    async with open_router(engine={"paused": True}) as setup:
        async with setup.router.websocket(PATH) as socket:
            await create(socket)
            await wait_all_tasks_blocked()
            [id] = [id for id, count in setup.leases().items() if count]
            await setup.servers[id].engine.step(2)
            assert setup.servers[id].engine.stats().blocks_used > 0
        await wait_all_tasks_blocked()
        await setup.servers[id].engine.step(1)
        assert setup.servers[id].engine.stats().blocks_used == 0
        assert not any(setup.leases().values())
        for server in setup.servers.values():
            server.engine.resume()


async def test_connection_continues_after_a_cancelled_response(open_router):
    async with open_router(engine={"paused": True}) as setup, setup.router.websocket(PATH) as socket:
        await create(socket)
        await wait_all_tasks_blocked()
        [id] = [id for id, count in setup.leases().items() if count]
        await setup.servers[id].engine.step(2)
        await until(socket, "response.output_text.delta")
        await socket.send(json.dumps({"type": "response.cancel"}))
        event = await until(socket, *ENDS)
        assert (event["type"], event["response"]["status"]) == ("response.incomplete", "cancelled")
        for server in setup.servers.values():
            server.engine.resume()
        assert (await ask(socket))["type"] == "response.completed"


async def test_lanes_run_side_by_side(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        await create(socket, stream_id="a")
        await create(socket, stream_id="b")
        ended = [await until(socket, *ENDS) for _ in range(2)]
        assert {event["stream_id"] for event in ended} == {"a", "b"}


async def test_warm_up_generates_nothing_and_can_be_continued(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        warm = (await ask(socket, "You are a pirate. " * 20, generate=False))["response"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        next_one = (await ask(socket, "Hi", previous_response_id=warm["id"]))["response"]
        assert next_one["usage"]["input_tokens_details"]["cached_tokens"] > 100


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"previous_response_id": "resp_unknown"}, 400, "previous_response_not_found"),
        ({"model": "unknown"}, 404, "model_not_found"),
        ({"background": True}, 400, None),
        ({"temperature": -1}, 400, None),
    ],
)
async def test_connection_continues_after_the_error_for_a_refused_message(open_router, fields, status, code):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        event = await ask(socket, **fields)
        assert (event["type"], event["status"]) == ("error", status)
        assert event["error"]["message"]
        assert code is None or event["error"]["code"] == code
        assert (await ask(socket))["type"] == "response.completed"


async def test_plain_request_for_the_websocket_is_refused(open_router):
    async with open_router() as setup:
        response = await setup.client().get(PATH)
        assert response.status == 426


async def test_drained_router_ends_the_response_and_closes_the_connection(open_router):
    async with open_router(engine={"paused": True}) as setup, setup.router.websocket(PATH) as socket:
        await create(socket)
        await wait_all_tasks_blocked()
        setup.router.announce_drain()
        for server in setup.servers.values():
            server.engine.resume()
        assert (await until(socket, *ENDS))["type"] == "response.completed"
        with pytest.raises(WebSocketClosed) as closed:
            await socket.receive()
        assert closed.value.code == 1001


ARRIVALS_SECONDS = 60


async def ask_and_steer(socket: MemoryWebSocket, rng: random.Random, **fields: Any) -> Any:
    """Take a turn, and steer it in one of five cases. Return the last event of the steered response, if it was cut."""
    await create(socket, "Hi", **fields)
    event = await until(socket, "response.created", *ENDS)
    if event["type"] in ENDS:
        return event
    if rng.random() < 0.2:
        await steer(socket, event["response"]["id"])
    return await until(socket, *ENDS)


async def visit(setup: Any, rng: random.Random, ends: Counter[str]) -> None:
    """Take turns on a connection, and leave in some phase or after the last turn."""
    await trio.sleep(rng.random() * ARRIVALS_SECONDS)
    leaves = rng.random() < 0.3
    async with setup.router.websocket(PATH) as socket:
        previous = None
        with trio.move_on_after(rng.random() if leaves else 1000):
            for _ in range(rng.randrange(1, 4)):
                event = await ask_and_steer(socket, rng, previous_response_id=previous)
                end = event["type"] if event["type"] != "error" else event["error"]["code"] or event["error"]["type"]
                ends[end] += 1
                previous = event.get("response", {}).get("id")
                await trio.sleep(rng.random())


@pytest.mark.parametrize("client_count", [50, pytest.param(1000, marks=pytest.mark.slow)])
async def test_two_killed_endpoints_leave_no_lease_and_no_websocket(open_router, autojump_clock, client_count):
    engine = {"response": "x" * 20, "step_seconds": 0.01, "max_num_seqs": 32}
    async with open_router(ids="abc", engine=engine, failures_max=1_000_000, continuations_per_second_max=1e6) as setup:
        rng = random.Random(client_count)
        ends: Counter[str] = Counter()
        async with trio.open_nursery() as nursery:
            for _ in range(client_count):
                nursery.start_soon(visit, setup, random.Random(rng.random()), ends)
            for id in "ab":
                await trio.sleep(ARRIVALS_SECONDS / 3)
                setup.unreachable.add(id)
                await setup.servers[id].hang_up()
        await wait_all_tasks_blocked()
        counters = setup.router.server.counters()
        assert counters.websockets_total == client_count
        assert set(ends) <= {"response.completed", "response.incomplete", "endpoint_lost"}, ends
        assert ends["response.completed"] > client_count
        assert ends["response.incomplete"] > client_count / 10, "few responses were steered"
        assert (counters.websockets_open, counters.exchanges_open) == (0, 0)
        assert not any(setup.leases().values())


def test_error_that_ends_a_stream_becomes_a_message_with_a_type():
    error = {"message": "the endpoint was lost", "type": "overloaded", "code": "endpoint_lost"}
    message = json.loads(response_turn._as_message(json.dumps({"error": error}, separators=(",", ":")).encode()))
    assert message == {"type": "error", "sequence_number": 0, "status": 500, "error": error}
    event = b'{"type":"response.created","sequence_number":0}'
    assert response_turn._as_message(event) == event


async def test_events_and_the_stored_response_name_the_previous_response(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        first = (await ask(socket, "Who are you?"))["response"]
        await create(socket, "And now?", previous_response_id=first["id"], store=True)
        created = await until(socket, "response.created")
        completed = await until(socket, *ENDS)
        for event in (created, completed):
            assert event["response"]["previous_response_id"] == first["id"]
        id = completed["response"]["id"]
        stored = await (await setup.client().get(f"{PATH}/{id}")).json()
        assert stored == completed["response"]
        body = {"model": "fake", "input": "And then?", "previous_response_id": id}
        third = await (await setup.client().post(PATH, body)).json()
        assert third["previous_response_id"] == id
        assert third["usage"]["input_tokens"] > stored["usage"]["total_tokens"]


async def test_end_of_the_connection_ends_its_session_at_the_endpoint_of_its_last_turn(open_router):
    async with open_router() as setup:
        async with setup.router.websocket(PATH) as socket:
            first = (await ask(socket, "Who are you?"))["response"]
            [home] = [id for id, server in setup.servers.items() if len(server.engine.sessions)]
            await setup.client().post(f"/endpoints/{home}/drain", {})
            await ask(socket, "And now?", previous_response_id=first["id"])
            [other] = [id for id in setup.servers if id != home]
            assert len(setup.servers[other].engine.sessions) == 1
            [session] = setup.servers[other].engine.sessions
            assert session.retained_block_count > 0
        await wait_all_tasks_blocked()
        assert len(setup.servers[other].engine.sessions) == 0


async def test_session_that_the_client_names_outlives_the_connection(open_router):
    async with open_router() as setup:
        async with setup.router.websocket(PATH, headers={"x-session-id": "mine"}) as socket:
            await ask(socket)
        await wait_all_tasks_blocked()
        names = [session.name for server in setup.servers.values() for session in server.engine.sessions]
        assert names == ["mine"]


async def test_connections_with_equal_request_ids_have_sessions_of_their_own(open_router):
    async with open_router() as setup, setup.router.websocket(PATH) as socket:
        headers = {"x-request-id": "one"}
        async with setup.router.websocket(PATH, headers=headers) as first:
            async with setup.router.websocket(PATH, headers=headers) as second:
                await ask(first)
                await ask(second)
            await wait_all_tasks_blocked()
            assert sum(len(server.engine.sessions) for server in setup.servers.values()) == 1
        assert (await ask(socket))["type"] == "response.completed"


async def test_connection_is_closed_when_it_reaches_the_maximum_age(open_router, autojump_clock):
    limits = ConnectionSettings(seconds_max=60)
    async with open_router(connections=limits) as setup, setup.router.websocket(PATH) as socket:
        event = await until(socket, *ENDS)
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(WebSocketClosed) as closed:
            await socket.receive()
        assert closed.value.code == 1001
        assert trio.current_time() >= 60


@pytest.mark.parametrize("move", ["true", "false"])
async def test_next_turn_runs_at_another_endpoint_after_its_endpoint_was_drained(open_router, move):
    async with open_router(engine={"paused": True}) as setup, setup.router.websocket(PATH) as socket:
        await create(socket, "Who are you?")
        await wait_all_tasks_blocked()
        [home] = [id for id, count in setup.leases().items() if count]
        [other] = [id for id in setup.servers if id != home]
        await setup.servers[home].engine.step(3)
        await setup.client().post(f"/endpoints/{home}/drain?move={move}", {})
        for server in setup.servers.values():
            server.engine.resume()
        first = (await until(socket, *ENDS))["response"]
        assert text_of(first) == "Hello!"
        steps = setup.servers[home].engine.stats().steps_total
        second = (await ask(socket, "And now?", previous_response_id=first["id"]))["response"]
        assert second["previous_response_id"] == first["id"]
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert setup.servers[home].engine.stats().steps_total == steps
        assert setup.servers[other].engine.stats().steps_total > 0


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


async def test_router_cuts_a_steered_response_and_its_successor_has_the_input(open_router, autojump_clock):
    seen: list[str] = []
    lengths = iter((500, 2))
    engine = {"response": lambda text: seen.append(text) or "x" * next(lengths), "step_seconds": 0.01}
    async with open_router(engine=engine) as setup, setup.router.websocket(PATH) as socket:
        await create(socket, "one", stream_id="a", metadata={"k": "v"})
        first = (await until(socket, "response.created"))["response"]["id"]
        await until(socket, "response.output_text.delta")
        await steer(socket, first)
        events = []
        while not events or events[-1]["type"] not in ENDS:
            events.append(json.loads(await socket.receive()))
        assert {event["stream_id"] for event in events} == {"a"}
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        kinds = [event["type"] for event in events]
        assert kinds[-4:-1] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert "response.steer.accepted" in kinds
        cut = events[-1]["response"]
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "steered"})
        assert 0 < len(text_of(cut)) < 500
        assert events[-4]["text"] == text_of(cut)
        successor = (await until(socket, *ENDS))["response"]
        assert (successor["previous_response_id"], successor["metadata"]) == (first, {"k": "v"})
        assert text_of(successor) == "xx"
        assert seen[-1] == f"user: one\nassistant: {text_of(cut)}\nuser: Shorter!\nassistant: "


async def test_router_holds_steered_input_until_the_outputs_of_tools(open_router, autojump_clock):
    seen: list[str] = []
    outputs = iter((CALL + "x" * 100, "ok"))
    engine = {"response": lambda text: seen.append(text) or next(outputs), "step_seconds": 0.01}
    async with open_router(engine=engine) as setup, setup.router.websocket(PATH) as socket:
        await create(socket, tools=[TOOL])
        first = (await until(socket, "response.created"))["response"]["id"]
        await until(socket, "response.output_item.added")
        await steer(socket, first, "Hurry!")
        accepted = await until(socket, "response.steer.accepted")
        assert (await until(socket, *ENDS))["response"]["status"] == "completed"
        pending = await until(socket, "response.steer.pending")
        assert pending["steer"] == {"id": accepted["steer"]["id"], "previous_response_id": first}
        [required] = pending["required_input"]
        assert (required["type"], required["name"]) == ("function_call_output", "weather")
        output = {"type": "function_call_output", "call_id": required["call_id"], "output": "rain"}
        end = await ask(socket, [output], previous_response_id=first, tools=[TOOL])
        assert text_of(end["response"]) == "ok"
        assert seen[-1].index("rain") < seen[-1].index("Hurry!")


async def test_router_returns_steered_input_that_no_response_gets(open_router, autojump_clock):
    engine = {"response": "x" * 500, "step_seconds": 0.01}
    async with open_router(engine=engine) as setup, setup.router.websocket(PATH) as socket:
        await create(socket)
        first = (await until(socket, "response.created"))["response"]["id"]
        await until(socket, "response.output_text.delta")
        await steer(socket, first, "y" * 5000)
        assert (await until(socket, *ENDS))["response"]["incomplete_details"] == {"reason": "steered"}
        failed = await until(socket, "response.steer.failed")
        assert (failed["error"]["code"], failed["steer"]["input"]) == ("successor_creation_failed", "y" * 5000)
        assert (await until(socket, "error"))["error"]["code"] == "context_length_exceeded"
        for response_id, code in ((first, "response_already_completed"), ("resp_x", "response_not_found")):
            await steer(socket, response_id)
            assert (await until(socket, "response.steer.failed"))["error"]["code"] == code
