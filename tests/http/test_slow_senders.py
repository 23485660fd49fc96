"""Tests the minimum rate of requests: a head or body that is sent a byte at a time is refused, a slow upload is not."""

from __future__ import annotations

import hyperframe.frame as frames
import pytest
import trio

from trioserve.http.asgi.app import AsgiApp
from trioserve.http.limits import FrontendLimits
from trioserve.http.pace import BodyPace

RATE = FrontendLimits().body_bytes_per_second_min
WAIT = FrontendLimits().body_wait_seconds_max


async def measure(exchange) -> None:
    body = await exchange.body()
    await exchange.respond(200, [], b"%d" % len(body))


async def begin(front, http: int, byte_count: int):
    """Start a request whose body follows.

    Returns:
        The connection, a function that sends a piece of the body, and a function that reads status and body of the
        response.
    """
    if http == 1:
        client = front.h11()
        await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % byte_count)

        async def status() -> tuple[int, bytes]:
            received = b""
            while b"\r\n\r\n" not in received or not received.partition(b"\r\n\r\n")[2]:
                received += await client.stream.receive_some()
            return int(received.split()[1]), received.partition(b"\r\n\r\n")[2]

        async def send_raw(data: bytes, *, end: bool = False) -> None:
            await client.raw(data)

        return client, send_raw, status
    client = await front.h2()
    stream_id = await client.request(end=False, headers=(("content-length", str(byte_count)),))

    async def send(data: bytes, *, end: bool = False) -> None:
        for start in range(0, len(data), 16384):
            await client.data(stream_id, data[start : start + 16384], end=end and start + 16384 >= len(data))

    async def response() -> tuple[int, bytes]:
        answered = await client.response(stream_id)
        return answered.status, answered.body

    return client, send, response


async def responded_at(response, nursery: trio.Nursery) -> tuple[trio.Event, list]:
    """Read a response in the background.

    Returns:
        An event that is set when the response has arrived, and a list that then contains the response and its arrival
        time.
    """
    has_arrived = trio.Event()
    arrived: list = []

    async def wait() -> None:
        arrived.extend((await response(), trio.current_time()))
        has_arrived.set()

    nursery.start_soon(wait)
    return has_arrived, arrived


async def check_refused(
    front, http: int, *, pieces: list[tuple[float, bytes]], seconds: float, **limits: float
) -> None:
    """Check that a client that sends `pieces`, each after a pause, gets 408 after `seconds`, and is counted."""
    the_front = front(measure, **limits)
    began_at = trio.current_time()
    client, send, response = await begin(the_front, http, 1_000_000)
    async with trio.open_nursery() as nursery:
        has_arrived, arrived = await responded_at(response, nursery)
        for pause, data in pieces:
            with trio.move_on_after(pause):
                await has_arrived.wait()
            if has_arrived.is_set():
                break
            await send(data)
        await has_arrived.wait()
    (status, body), at = arrived
    assert status == 408
    assert b"did not arrive in time" in body
    assert at - began_at == pytest.approx(seconds, abs=0.5)
    counters = the_front.server.counters()
    assert counters.connections_refused_total["body_timeout"] == 1
    assert counters.request_body_bytes_held == 0
    if http == 1:
        with trio.move_on_after(5):
            while await client.stream.receive_some():
                pass
        await client.stream.aclose()
        await the_front.settle()
        assert the_front.connection_count == 0
    else:
        again = await client.request(body=b"abc")  # The connection still works.
        assert (await client.response(again)).body == b"3"


@pytest.mark.parametrize("http", [1, 2])
async def test_body_with_a_byte_every_29_seconds_is_refused(autojump_clock, front, http):
    await check_refused(front, http, pieces=[(29.0, b"x")] * 20, seconds=WAIT)


@pytest.mark.parametrize("http", [1, 2])
async def test_body_with_a_byte_per_second_is_refused(autojump_clock, front, http):
    await check_refused(front, http, pieces=[(1.0, b"x")] * 200, seconds=WAIT)


@pytest.mark.parametrize("http", [1, 2])
async def test_many_bytes_at_the_start_allow_no_long_silence(autojump_clock, front, http):
    rush = [(0.1, bytes(30_000))] * 20
    await check_refused(front, http, pieces=[*rush, *[(20.0, b"x")] * 20], seconds=2.0 + WAIT)


@pytest.mark.parametrize("http", [1, 2])
async def test_body_at_half_the_minimum_rate_is_refused_after_twice_the_wait(autojump_clock, front, http):
    await check_refused(front, http, pieces=[(0.5, bytes(RATE // 4))] * 200, seconds=2 * WAIT)


@pytest.mark.parametrize("http", [1, 2])
async def test_body_at_the_minimum_rate_is_refused_after_the_total_time(autojump_clock, front, http):
    await check_refused(front, http, pieces=[(1.0, bytes(RATE))] * 60, seconds=40.5, body_seconds_max=40.5)


@pytest.mark.slow
@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize(
    ("bytes_per_second", "byte_count"), [(125_000, 24_000_000), (RATE * 5 // 4, RATE * 5 // 4 * 300)]
)
async def test_upload_over_a_slow_network_is_served(autojump_clock, front, http, bytes_per_second, byte_count):
    """One upload sends 24 MB at 1 Mbit/s. Another lasts five minutes at a little more than the minimum rate."""
    the_front = front(measure)
    began_at = trio.current_time()
    _, send, response = await begin(the_front, http, byte_count)
    async with trio.open_nursery() as nursery:
        has_arrived, arrived = await responded_at(response, nursery)
        for sent in range(bytes_per_second, byte_count + 1, bytes_per_second):
            await trio.sleep(1)
            await send(bytes(bytes_per_second), end=sent == byte_count)
        await has_arrived.wait()
    assert arrived[0] == (200, b"%d" % byte_count)
    assert arrived[1] - began_at > 120
    assert the_front.server.counters().connections_refused_total["body_timeout"] == 0


async def test_upload_with_a_short_pause_is_served(autojump_clock, front):
    _, send, response = await begin(front(measure), 1, 2_000_000)
    for _ in range(4):
        await send(bytes(500_000))
        await trio.sleep(25)
    assert (await response()) == (200, b"2000000")


@pytest.mark.parametrize(("bytes_per_second", "is_slow"), [(1, True), (RATE // 2, True), (RATE * 2, False)])
async def test_asgi_app_refuses_slow_bodies(autojump_clock, bytes_per_second, is_slow):
    app = AsgiApp(measure)
    sender, receiver = trio.open_memory_channel(1)
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async with trio.open_nursery() as nursery:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "http_version": "2"}
        nursery.start_soon(app, scope, receiver.receive, send)
        for second in range(100):
            await trio.sleep(1)
            if sent:
                break
            body = {"type": "http.request", "body": bytes(bytes_per_second), "more_body": second < 99}
            await sender.send(body)
    assert sent[0]["status"] == (408 if is_slow else 200)
    assert app.counters().connections_refused_total["body_timeout"] == is_slow


# --- heads ---


@pytest.mark.parametrize("seconds", [0.5, 4.0, 9.0])
async def test_slow_request_head_gets_408_over_http1(autojump_clock, front, seconds):
    the_front = front(measure, head_seconds_max=10)
    client = the_front.h11()
    began_at = trio.current_time()
    received = b""

    async def read() -> None:
        nonlocal received
        while piece := await client.stream.receive_some():
            received += piece
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for byte in b"GET / HTTP/1.1\r\nhost: test\r\nx-more: " + b"x" * 1000:
            await client.raw(bytes([byte]))
            await trio.sleep(seconds)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert trio.current_time() - began_at == pytest.approx(10, abs=0.1)
    assert the_front.server.counters().connections_refused_total["head_timeout"] == 1


@pytest.mark.parametrize("shape", ["one frame", "continuations"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a stream"])
async def test_slow_request_head_ends_the_connection_over_http2(autojump_clock, front, watched, shape, beside):
    """The connection also ends if only a part of the head's first frame has arrived, or if other streams run."""
    handler = watched()
    the_front = front(handler, head_seconds_max=10, idle_seconds_max=1000)
    client = await the_front.h2()
    if beside:
        await client.request("/beside")
        await the_front.settle()
        assert handler.running == 1
    if shape == "one frame":
        sent = [bytes([byte]) for byte in frames.HeadersFrame(3, data=b"\x82" * 500).serialize()]
    else:
        first = frames.HeadersFrame(3, data=b"\x82")
        sent = [first.serialize(), *[frames.ContinuationFrame(3, data=b"").serialize()] * 500]
    await the_front.settle()
    began_at = trio.current_time()

    async def trickle() -> None:
        for piece in sent:
            try:
                await client.stream.send_all(piece)
            except trio.BrokenResourceError:
                return
            await trio.sleep(0.5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        await client.until_eof()
        # The deadline may start with the fourth byte, which is the kind of the frame.
        assert trio.current_time() - began_at == pytest.approx(10, abs=2.6)
        nursery.cancel_scope.cancel()
    assert the_front.server.counters().connections_refused_total["head_timeout"] == 1
    assert handler.running == 0


async def test_slow_data_frame_has_no_head_deadline(autojump_clock, front):
    """A DATA frame may take longer than a head."""
    the_front = front(measure, head_seconds_max=5)
    client = await the_front.h2()
    stream_id = await client.request(end=False)
    frame = frames.DataFrame(stream_id, data=bytes(10), flags=["END_STREAM"]).serialize()
    for byte in frame:
        await client.stream.send_all(bytes([byte]))
        await trio.sleep(1)
    assert (await client.response(stream_id)).body == b"10"


# --- BodyPace alone ---


def test_body_deadline_moves_with_each_byte_up_to_the_full_wait():
    pace = BodyPace(FrontendLimits(body_bytes_per_second_min=100, body_wait_seconds_max=10), now=50.0)
    assert pace.deadline == 60.0
    assert pace.arrived(100, now=50.5) == 60.5
    assert pace.arrived(200, now=55.0) == 62.5
    assert pace.arrived(0, now=56.0) == 62.5
    assert pace.arrived(1_000_000, now=57.0) == 67.0


def test_total_time_limits_the_body_deadline_and_the_message_names_it():
    pace = BodyPace(FrontendLimits(body_wait_seconds_max=10, body_seconds_max=25), now=50.0)
    assert pace.arrived(10_000_000, now=64.0) == 74.0
    assert "--body-timeout" not in pace.timeout_message
    assert pace.arrived(10_000_000, now=70.0) == 75.0
    assert "all of it may take 25 seconds (--body-timeout)" in pace.timeout_message
