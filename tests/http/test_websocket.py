"""Tests of websockets: the opening handshake, messages in both directions, the closing handshake, and clients that
leave.
"""

from __future__ import annotations

from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import Overloaded
from trioserve.http.counters import StreamRefusal, show_counters
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics
from trioserve.testing.memory_client import memory_connection
from trioserve.testing.memory_server import MemoryWebSocket, WebSocketClosed, WebSocketRefused

PASSES_MAX = 6


async def echo(exchange):
    websocket = await exchange.accept_websocket()
    while True:
        await websocket.send(await websocket.receive())


async def silent(exchange):
    await exchange.accept_websocket()
    await trio.sleep_forever()


@pytest.fixture(params=[1, 2])
def http(request) -> int:
    return request.param


def connected(front, http: int = 1) -> MemoryWebSocket:
    return MemoryWebSocket(front.connect(memory_connection), http=http)


async def opened(front, http: int = 1) -> MemoryWebSocket:
    websocket = connected(front, http)
    await websocket.open("/")
    return websocket


async def test_messages_arrive_whole_and_keep_their_type(autojump_clock, front, http):
    websocket = await opened(front(echo), http)
    for message in ("", "text", "ä€🙂" * 40_000, b"", b"\x00\xff", bytes(range(256)) * 300):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(websocket.send, message)
            assert await websocket.receive() == message
    websocket.leave()


async def test_handler_that_returns_closes_the_websocket_with_1000(autojump_clock, front, http):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        await websocket.send("bye")

    the_front = front(handler)
    websocket = await opened(the_front, http)
    assert await websocket.receive() == "bye"
    with pytest.raises(WebSocketClosed) as closed:
        await websocket.receive()
    assert closed.value.code == 1000
    websocket.leave()
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.exchanges_left_total, counters.exchanges_failed_total) == (0, 0)
    assert the_front.connection_count == 0


async def test_handler_that_fails_closes_the_websocket_with_1011(autojump_clock, front, caplog, http):
    async def handler(exchange):
        await exchange.accept_websocket()
        raise ValueError("a bug")

    the_front = front(handler)
    websocket = await opened(the_front, http)
    assert (await websocket.closed()).code == 1011
    websocket.leave()
    await the_front.settle()
    assert the_front.server.counters().exchanges_failed_total == 1
    assert "handler failed" in caplog.text


async def test_close_frame_of_the_client_is_answered_once_and_cancels_the_handler(autojump_clock, front, watched, http):
    handler = watched(echo)
    the_front = front(handler)
    websocket = await opened(the_front, http)
    closed = await websocket.close(4321, "enough")
    assert (closed.code, closed.reason) == (4321, "enough")
    assert await handler.passes_until_ended() <= PASSES_MAX
    assert handler.cancelled
    assert await websocket.receive_raw() == b""  # The server sends nothing after its close frame.
    websocket.leave()
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.websockets_open, counters.exchanges_open, counters.exchanges_left_total) == (0, 0, 1)
    websocket.leave()
    await the_front.settle()
    assert the_front.connection_count == 0


@pytest.mark.parametrize("handler", [echo, silent])
@pytest.mark.parametrize("leave", ["leave", "abort", "half_close"])
async def test_handler_is_cancelled_within_a_few_scheduler_passes_if_the_client_leaves(
    autojump_clock, front, watched, handler, leave, http
):
    handler = watched(handler)
    the_front = front(handler)
    websocket = await opened(the_front, http)
    if leave == "half_close":
        await websocket.half_close()
    else:
        getattr(websocket, leave)()
    assert await handler.passes_until_ended() <= PASSES_MAX
    assert handler.cancelled
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.websockets_open, counters.exchanges_open, counters.exchanges_left_total) == (0, 0, 1)
    websocket.leave()
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_client_without_a_close_frame_delays_the_close_of_the_handler_by_at_most_the_limit(
    autojump_clock, front, http
):
    seconds = []

    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        began_at = trio.current_time()
        await websocket.close(1001, "the server stops")
        seconds.append(trio.current_time() - began_at)

    the_front = front(handler, close_seconds_max=3)
    await opened(the_front, http)
    await trio.sleep(10)
    assert seconds == [3]
    assert the_front.server.counters().websockets_open == 0


async def test_send_and_receive_after_the_own_close_cancel_the_handler(autojump_clock, front, watched, http):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(websocket.receive)
            await websocket.close()
            await websocket.send("too late")

    handler = watched(handler)
    the_front = front(handler)
    websocket = await opened(the_front, http)
    assert (await websocket.closed()).code == 1000
    await handler.ended.wait()
    assert the_front.server.counters().exchanges_failed_total == 0


@pytest.mark.parametrize(
    "changes, status",
    [
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Sec-WebSocket-Key": "c2hvcnQ="}, 400),
        ({"Sec-WebSocket-Key": "***"}, 400),
        ({"Content-Length": "3"}, 400),
    ],
)
async def test_malformed_opening_handshake_is_refused(autojump_clock, front, changes, status):
    websocket = connected(front(echo))
    with pytest.raises(WebSocketRefused) as refused:
        await websocket.open("/", changes)
    assert refused.value.status == status
    if status == 426:
        assert refused.value.headers["sec-websocket-version"] == "13"
        assert refused.value.headers["upgrade"] == "websocket"


async def test_handler_refuses_a_websocket_with_an_ordinary_response(autojump_clock, front, http):
    async def handler(exchange):
        assert exchange.is_websocket
        await exchange.respond(403, [], b"not you")

    websocket = connected(front(handler), http)
    with pytest.raises(WebSocketRefused) as refused:
        await websocket.open("/")
    assert (refused.value.status, refused.value.body) == (403, b"not you")


async def test_plain_request_opens_no_websocket(autojump_clock, front):
    async def handler(exchange):
        assert not exchange.is_websocket
        with pytest.raises(RuntimeError, match="no websocket"):
            await exchange.accept_websocket()
        await exchange.respond(200, [], b"plain")

    client = front(handler).h11()
    await client.request(method="GET")
    assert (await client.response())[2] == b"plain"


async def test_accept_token_is_that_of_the_example_in_rfc_6455(autojump_clock, front):
    websocket = connected(front(echo))
    await websocket.open("/", {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert websocket.headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    websocket.leave()


async def test_silent_client_is_pinged_and_lost_if_it_does_not_answer(autojump_clock, front, watched, http):
    handler = watched(echo)
    the_front = front(handler, websocket_ping_seconds=20, websocket_pong_seconds_max=7)
    websocket = await opened(the_front, http)
    websocket.answers_pings = False
    began_at = trio.current_time()
    assert (await websocket.closed()).code == 1011
    await handler.ended.wait()
    assert trio.current_time() - began_at == 27
    assert len(websocket.pings) == 1
    assert handler.cancelled


async def test_client_that_answers_pings_stays_until_the_idle_limit(autojump_clock, front, http):
    websocket = await opened(front(echo, websocket_ping_seconds=20, websocket_idle_seconds_max=1000), http)
    began_at = trio.current_time()
    closed = await websocket.closed()
    assert (closed.code, closed.reason) == (1001, "no message for 1000 seconds")
    assert trio.current_time() - began_at == 1000
    assert len(websocket.pings) == 49


async def test_draining_is_set_when_the_server_starts_to_drain(autojump_clock, front, http):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        await websocket.draining.wait()
        await websocket.close(1001, "the server stops")

    the_front = front(handler)
    websocket = await opened(the_front, http)
    the_front.server.announce_drain()
    closed = await websocket.closed()
    assert (closed.code, closed.reason) == (1001, "the server stops")
    await the_front.server.wait_until_answered()


async def test_cancelling_the_server_sends_the_close_code_1001(autojump_clock, front, watched, http):
    handler = watched(silent)
    the_front = front(handler)
    websocket = await opened(the_front, http)
    the_front.server.drain()
    await the_front.settle()
    assert handler.running == 1
    the_front.cancel()
    assert (await websocket.closed()).code == 1001
    assert handler.cancelled
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_client_that_stops_reading_loses_its_connection_after_the_stall_limit(
    autojump_clock, front, watched, http
):
    async def handler(exchange):
        websocket = await exchange.accept_websocket()
        while True:
            await websocket.send(bytes(10_000))

    handler = watched(handler)
    the_front = front(handler, stall_seconds_max=30)
    websocket = await opened(the_front, http)
    began_at = trio.current_time()
    await handler.ended.wait()
    assert trio.current_time() - began_at == pytest.approx(30, abs=0.1)
    assert handler.cancelled
    await the_front.settle()
    counters = the_front.server.counters()
    assert counters.exchanges_stalled_total >= 1  # Over HTTP/2, the stream and its connection may both stall.
    assert (counters.websockets_open, counters.exchanges_open) == (0, 0)
    websocket.leave()
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_silent_websocket_is_closed_although_the_connection_that_runs_the_checks_has_ended(
    autojump_clock, front, http
):
    the_front = front(echo, websocket_ping_seconds=20, websocket_pong_seconds_max=7)
    first, second = await opened(the_front, http), await opened(the_front, http)
    second.answers_pings = False
    began_at = trio.current_time()
    await trio.sleep(5)
    first.leave()
    assert (await second.closed()).code == 1011
    assert trio.current_time() - began_at == 27


async def test_one_task_pings_all_websockets(autojump_clock, front):
    the_front = front(echo, websocket_ping_seconds=20)
    websockets = [await opened(the_front) for _ in range(100)]
    async with trio.open_nursery() as nursery:
        for websocket in websockets:
            nursery.start_soon(websocket.closed)
        await trio.sleep(1)
        tasks = [task for connection in the_front.nursery.child_tasks for task in descendants(connection)]
        assert sum("WebSocketTimer" in task.name for task in tasks) == 1
        await trio.sleep(60)
        assert {len(websocket.pings) for websocket in websockets} == {3}
        nursery.cancel_scope.cancel()
    for websocket in websockets:
        websocket.leave()


def descendants(task: trio.lowlevel.Task) -> list[trio.lowlevel.Task]:
    children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return [*children, *(found for child in children for found in descendants(child))]


async def test_idle_websockets_use_no_request_slots(autojump_clock, front, http):
    slots = []

    async def handler(exchange):
        if not exchange.is_websocket:
            await exchange.respond(200, [], b"ok")
            return
        websocket = await exchange.accept_websocket()
        while True:
            message = await websocket.receive()
            if message == "begin":
                try:
                    slots.append(websocket.take_slot())
                except Overloaded as error:
                    message = error.reason
            elif message == "end":
                slots.pop()()
            await websocket.send(message)

    the_front = front(handler, exchanges_max=1)
    websockets = [await opened(the_front, http) for _ in range(3)]
    counters = the_front.server.counters()
    assert (counters.websockets_open, counters.exchanges_open) == (3, 0)
    assert await asked(websockets[0], "begin") == "begin"
    assert the_front.server.counters().exchanges_open == 1
    assert await asked(websockets[1], "begin") == "exchanges_max"
    client = the_front.h11()
    await client.request(method="GET")
    assert (await client.response(next_cycle=False))[0] == 503
    assert await asked(websockets[0], "end") == "end"
    assert await asked(websockets[1], "begin") == "begin"
    assert await asked(websockets[1], "end") == "end"
    for websocket in websockets:
        websocket.leave()
    await the_front.settle()
    counters = the_front.server.counters()
    assert (counters.websockets_open, counters.exchanges_open) == (0, 0)
    assert counters.streams_refused_total[StreamRefusal.EXCHANGES_MAX] == 2


async def asked(websocket: MemoryWebSocket, message: str) -> str | bytes:
    await websocket.send(message)
    return await websocket.receive()


async def test_websockets_of_a_server_are_bounded(autojump_clock, front):
    the_front = front(echo, websockets_max=2)
    first, second = await opened(the_front), await opened(the_front, 2)
    with pytest.raises(WebSocketRefused) as refused:
        await opened(the_front)
    assert (refused.value.status, refused.value.headers["x-trioserve-reason"]) == (503, "websockets_max")
    client = the_front.h11()  # Requests are served.
    await client.request(method="GET")
    assert (await client.response(next_cycle=False))[0] == 500  # The handler accepts only websockets.
    first.leave()
    await the_front.settle()
    third = await opened(the_front)
    for websocket in (second, third):
        websocket.leave()
    await the_front.settle()
    assert the_front.server.counters().streams_refused_total[StreamRefusal.WEBSOCKETS_MAX] == 1


async def test_drain_waits_only_for_websockets_that_were_opened_before_it(autojump_clock, front):
    the_front = front(echo)
    early = await opened(the_front)
    the_front.server.announce_drain()
    late = await opened(the_front)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(the_front.server.wait_until_answered)
        await the_front.settle()
        assert nursery.child_tasks
        early.leave()
    late.leave()


@pytest.mark.parametrize("has_keys", [True, False])
async def test_websockets_of_one_caller_are_bounded(autojump_clock, has_keys):
    def knows(headers):
        return headers.get("authorization") in ("Bearer one", "Bearer two")

    limits = FrontendLimits(websockets_per_caller_max=2)
    server = FrontendServer(echo, limits=limits, knows_caller=knows if has_keys else None)

    async def opens(key: str, port: int) -> MemoryWebSocket:
        ours, theirs = memory_connection()
        nursery.start_soon(partial(server.serve_connection, theirs, peer=f"10.0.0.{port % 2}:{port}"))
        websocket = MemoryWebSocket(ours)
        await websocket.open("/", {"Authorization": f"Bearer {key}"})
        return websocket

    async with trio.open_nursery() as nursery:
        first = await opens("one", 2)
        await opens("one", 4)
        with pytest.raises(WebSocketRefused) as refused:
            await opens("one", 7 if has_keys else 6)  # Another address does not help a caller with a key.
        assert refused.value.status == 429
        assert refused.value.headers["x-trioserve-reason"] == "websockets_per_caller"
        if not has_keys:  # An invented key does not help an address.
            with pytest.raises(WebSocketRefused):
                await opens("two", 8)
        await opens("two", 9)
        first.leave()
        await wait_all_tasks_blocked()
        await opens("one", 10)
        nursery.cancel_scope.cancel()
    counters = server.counters()
    assert counters.streams_refused_total[StreamRefusal.WEBSOCKETS_PER_CALLER] == 2 - has_keys
    assert (counters.websockets_open, counters.websockets_total, counters.exchanges_open) == (0, 4, 0)


async def test_messages_and_bytes_of_websockets_are_counted(autojump_clock, front):
    metrics = Metrics("m")
    the_front = front(echo)
    show_counters(metrics, the_front.server.counters)
    websocket = await opened(the_front)
    await websocket.send("12345")
    await websocket.receive()
    await websocket.send(b"")
    await websocket.receive()
    lines = metrics.expose().decode().splitlines()
    values = dict(line.rpartition(" ")[::2] for line in lines if line.startswith("trioserve:websocket"))
    assert {name.partition("{")[0].removeprefix("trioserve:"): value for name, value in values.items()} == {
        "websockets_open": "1.0",
        "websockets_max": "8192.0",
        "websockets_total": "1.0",
        "websocket_messages_received_total": "2.0",
        "websocket_messages_sent_total": "2.0",
        "websocket_bytes_received_total": "17.0",  # The heads of masked frames have six bytes.
        "websocket_bytes_sent_total": "9.0",
    }
    websocket.leave()
