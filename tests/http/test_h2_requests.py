"""Tests HTTP/2 with a correct client: requests, responses, streaming and flow control."""

from __future__ import annotations

import hyperframe.frame as frames
import pytest
import trio

from trioserve.http.exchange import BodyTooLarge

JSON = [("content-type", "application/json")]


async def echo(exchange):
    body = await exchange.body()
    await exchange.respond(
        200, [("x-path", exchange.path), ("x-query", exchange.query)], exchange.method.encode() + body
    )


async def test_request_reaches_the_handler_and_its_response_reaches_the_client(autojump_clock, front):
    client = await front(echo).h2()
    response = await client.response(await client.request("/v1/a%20b?c=d&e", body=b"hello"))
    assert (response.status, response.body, response.ended) == (200, b"POSThello", True)
    assert response.headers["x-path"] == "/v1/a b"
    assert response.headers["x-query"] == "c=d&e"
    assert response.headers["content-length"] == "9"
    assert "date" in response.headers


async def test_handler_sees_authority_as_host_and_headers_in_any_case(autojump_clock, front):
    seen = []

    async def handler(exchange):
        seen.append((exchange.headers.get("host"), exchange.headers.get("x-key"), exchange.http_version, exchange.peer))
        await exchange.respond(204, [], b"")

    client = await front(handler).h2()
    response = await client.response(await client.request(headers=(("x-key", "a"), ("x-key", "b"))))
    assert seen == [("test", "a, b", "2", "test")]
    assert (response.status, response.body) == (204, b"")


async def test_small_response_is_sent_in_one_write(autojump_clock, front):
    client = await front(echo).h2()
    await client.until(lambda: len(client.frames) >= 2)  # The first frames are the settings of the server.
    seen = len(client.reads)
    await client.response(await client.request(body=b"x"))
    assert len(client.reads) == seen + 1


async def test_streamed_response_arrives_piece_by_piece(autojump_clock, front):
    proceed = trio.Event()

    async def handler(exchange):
        await exchange.start(200, [("content-type", "text/event-stream")])
        await exchange.send(b"one")
        await proceed.wait()
        await exchange.send(b"two")
        await exchange.finish()

    client = await front(handler).h2()
    stream_id = await client.request()
    response = client.responses[stream_id]
    await client.until(lambda: response.body == b"one")
    assert response.status == 200
    assert not response.ended
    proceed.set()
    await client.response(stream_id)
    assert (response.body, response.ended) == (b"onetwo", True)


async def test_head_is_sent_before_the_first_byte_of_the_body(autojump_clock, front):
    async def handler(exchange):
        await exchange.start(200, [("x-request-id", "r-1")])
        await trio.sleep_forever()

    client = await front(handler).h2()
    response = client.responses[await client.request()]
    await client.until(lambda: response.status is not None)
    assert response.headers["x-request-id"] == "r-1"


async def test_events_of_many_streams_in_one_scheduler_pass_are_sent_in_one_write(autojump_clock, front):
    step = trio.Event()

    async def handler(exchange):
        await exchange.start(200, [])
        await step.wait()
        await exchange.send(b"token")
        await exchange.finish()

    client = await front(handler).h2()
    made = [client.request_frames() for _ in range(64)]
    await client.send(*(frame for _, request in made for frame in request))
    await client.until(lambda: all(response.status for response in client.responses.values()))
    seen = len(client.reads)
    step.set()
    await client.until(lambda: all(response.ended for response in client.responses.values()))
    assert client.reads[seen] == 64


async def test_responses_of_many_parallel_streams_are_not_mixed_up(autojump_clock, front):
    client = await front(echo).h2()
    made = [client.request_frames(f"/{number}", body=b"%d" % number) for number in range(100)]
    await client.send(*(frame for _, request in made for frame in request))
    for number, (stream_id, _) in enumerate(made):
        response = await client.response(stream_id)
        assert (response.headers["x-path"], response.body) == (f"/{number}", b"POST%d" % number)


async def test_window_updates_are_sent_while_the_client_sends_nothing(autojump_clock, front):
    client = await front(echo).h2()
    stream_id = await client.request(end=False)
    await client.data(stream_id, bytes(16384), end=False)

    def credited() -> int:
        updates = [f for f in client.frames if isinstance(f, frames.WindowUpdateFrame) and f.stream_id == stream_id]
        return sum(frame.window_increment for frame in updates)

    with trio.fail_after(5):
        await client.until(lambda: credited() == 16384)


async def test_window_of_a_long_body_opens_again_as_the_handler_reads(autojump_clock, front):
    client = await front(echo).h2()
    body = bytes(range(256)) * 1024
    stream_id = await client.request(end=False)

    def window() -> int:
        updates = [f for f in client.frames if isinstance(f, frames.WindowUpdateFrame) and f.stream_id == stream_id]
        return 65535 + sum(frame.window_increment for frame in updates)

    for start in range(0, len(body), 16384):
        end = start + 16384
        await client.until(lambda end=end: window() >= end)
        await client.data(stream_id, body[start:end], end=end == len(body))
    # The response is larger than the client's window, so the client must also send window updates.
    await client.credit(0, 10**6)
    await client.credit(stream_id, 10**6)
    response = await client.response(stream_id)
    assert response.body == b"POST" + body


async def test_unread_bodies_do_not_close_the_connection_window(autojump_clock, front):
    async def handler(exchange):
        if exchange.path == "/unread":
            await trio.sleep_forever()
        await echo(exchange)

    the_front = front(handler)
    client = await the_front.h2()
    # The bodies have 1.2 MB, more than the connection's window. Without credit, h2 would end the connection.
    for _ in range(20):
        stream_id = await client.request("/unread", end=False)
        for _ in range(4):
            await client.data(stream_id, bytes(15_000))
        await the_front.settle()
    response = await client.response(await client.request("/read", body=b"hello"))
    assert response.body == b"POSThello"
    credited = sum(f.window_increment for f in client.frames if isinstance(f, frames.WindowUpdateFrame))
    assert credited >= 1_150_000


async def test_request_body_in_padded_frames_is_read(autojump_clock, front):
    client = await front(echo).h2()
    stream_id = await client.request(end=False)
    padded = frames.DataFrame(stream_id, data=b"abc", pad_length=200, flags=["PADDED", "END_STREAM"])
    await client.send(padded)
    assert (await client.response(stream_id)).body == b"POSTabc"


async def test_body_can_be_read_twice_but_not_after_the_response_starts(autojump_clock, front):
    results = []

    async def handler(exchange):
        results.append(await exchange.body())
        results.append(await exchange.body())
        await exchange.start(200, [])
        with pytest.raises(RuntimeError, match="read the request body before"):
            await exchange.body()
        await exchange.finish()

    client = await front(handler).h2()
    assert (await client.response(await client.request(body=b"hello"))).ended
    assert results == [b"hello", b"hello"]


async def test_expect_100_continue_is_answered_when_the_handler_reads_the_body(autojump_clock, front):
    client = await front(echo).h2()
    stream_id = await client.request(headers=(("expect", "100-continue"),), end=False)
    response = client.responses[stream_id]
    await client.until(lambda: response.informational == [100])
    await client.data(stream_id, b"now", end=True)
    assert (await client.response(stream_id)).body == b"POSTnow"


async def test_trailers_end_an_http2_request_body(autojump_clock, front):
    client = await front(echo).h2()
    stream_id = await client.request(body=b"abc", end=False)
    trailers = client._encoder.encode([("x-checksum", "1")])
    await client.send(frames.HeadersFrame(stream_id, data=trailers, flags=["END_HEADERS", "END_STREAM"]))
    assert (await client.response(stream_id)).body == b"POSTabc"


async def test_head_request_gets_no_response_body(autojump_clock, front):
    client = await front(echo).h2()
    response = await client.response(await client.request(method="HEAD"))
    assert (response.status, response.headers["content-length"], response.body) == (200, "4", b"")


async def test_http2_connect_request_is_refused(autojump_clock, front):
    client = await front(echo).h2()
    head = client._encoder.encode([(":method", "CONNECT"), (":authority", "elsewhere:443")])
    stream_id, _ = client.request_frames()
    await client.send(frames.HeadersFrame(stream_id, data=head, flags=["END_HEADERS", "END_STREAM"]))
    assert (await client.response(stream_id)).status == 405


@pytest.mark.parametrize("announced", [True, False])
async def test_body_beyond_the_limit_is_answered_with_413(autojump_clock, front, announced):
    async def handler(exchange):
        with pytest.raises(BodyTooLarge, match="at most 1000"):
            await exchange.body()
        await exchange.respond(413, JSON, b"{}")

    client = await front(handler, body_bytes_max=1000).h2()
    headers = (("content-length", "1001"),) if announced else ()
    stream_id = await client.request(headers=headers, body=b"" if announced else bytes(1001), end=False)
    response = await client.response(stream_id)
    assert response.status == 413
    await client.until(lambda: response.reset_code is not None)
    assert response.reset_code == 0


async def test_too_large_body_is_a_413_if_the_handler_does_not_catch_the_error(autojump_clock, front):
    client = await front(echo, body_bytes_max=1000).h2()
    response = await client.response(await client.request(body=bytes(1001)))
    assert response.status == 413
    assert b'"type":"invalid_request_error"' in response.body


async def test_bytes_of_all_request_bodies_together_are_limited(autojump_clock, front):
    async def handler(exchange):
        await exchange.body()
        await trio.sleep_forever()

    the_front = front(handler, bodies_bytes_max=1500)
    client = await the_front.h2()
    first = await client.request(body=bytes(1000))
    await the_front.settle()
    assert the_front.server.counters().request_body_bytes_held == 1000
    refused = await client.response(await client.request(body=bytes(1000)))
    # error_responses would turn Overloaded into 503, but this handler does not use error_responses.
    assert refused.status == 500
    await client.reset(first)
    await the_front.settle()
    assert the_front.server.counters().request_body_bytes_held == 0


async def test_request_body_that_stops_arriving_gets_408(autojump_clock, front):
    client = await front(echo, body_wait_seconds_max=5).h2()
    began_at = trio.current_time()
    response = await client.response(await client.request(body=b"abc", end=False))
    assert response.status == 408
    assert trio.current_time() - began_at == pytest.approx(5, abs=0.1)


async def test_closed_window_holds_bounded_bytes_and_other_streams_continue(autojump_clock, front):
    accepted = 0

    async def handler(exchange):
        nonlocal accepted
        if exchange.path == "/small":
            await exchange.respond(200, [], b"small")
            return
        await exchange.start(200, [])
        for _ in range(100):
            await exchange.send(bytes(1000))
            accepted += 1000
        await exchange.finish()

    the_front = front(handler, stream_buffer_bytes_max=20_000)
    client = await the_front.h2(INITIAL_WINDOW_SIZE=5000)
    stalled = await client.request("/stalled")
    await the_front.settle()
    assert accepted == 25_000
    small = await client.response(await client.request("/small"))
    assert small.body == b"small"
    await client.until(lambda: len(client.responses[stalled].body) == 5000)
    await client.credit(stalled, 200_000)
    await client.credit(0, 200_000)
    assert len((await client.response(stalled)).body) == 100_000


async def test_connection_window_is_shared_and_reopened(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [], bytes(60_000))

    client = await front(handler).h2()
    first, second = await client.request(), await client.request()
    await client.until(lambda: sum(len(response.body) for response in client.responses.values()) == 65535)
    assert not client.responses[second].ended
    await client.credit(0, 65535)
    assert len((await client.response(first)).body) == 60_000
    assert len((await client.response(second)).body) == 60_000


async def test_larger_initial_window_releases_waiting_bytes(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [], bytes(30_000))

    client = await front(handler).h2(INITIAL_WINDOW_SIZE=0)
    stream_id = await client.request()
    await client.until(lambda: client.responses[stream_id].status == 200)
    setting = frames.SettingsFrame(0)
    setting.settings = {frames.SettingsFrame.INITIAL_WINDOW_SIZE: 50_000}
    await client.send(setting)
    assert len((await client.response(stream_id)).body) == 30_000


async def test_large_response_shares_the_connection_with_small_responses(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [], bytes(1_000_000) if exchange.path == "/large" else b"small")

    client = await front(handler).h2(INITIAL_WINDOW_SIZE=2_000_000)
    await client.credit(0, 5_000_000)
    large = await client.request("/large")
    small = await client.response(await client.request("/small"))
    assert small.ended
    assert not client.responses[large].ended
    assert len((await client.response(large)).body) == 1_000_000


@pytest.mark.parametrize(
    "fields", [[("x-a", "one\r\ntwo")], [("x a", "b")], [("connection", "close")], [("x-a", "b\0")]]
)
async def test_header_that_would_break_the_message_is_an_error_of_the_handler(autojump_clock, front, fields, caplog):
    async def handler(exchange):
        await exchange.respond(200, fields, b"")

    client = await front(handler).h2()
    assert (await client.response(await client.request())).status == 500
    assert "handler failed" in caplog.text


async def test_last_bytes_obey_the_buffer_limit(autojump_clock, front):
    is_over = False

    async def handler(exchange):
        nonlocal is_over
        await exchange.start(200, [])
        await exchange.finish(bytes(100_000) if exchange.path == "/large" else b"last")
        is_over = True

    the_front = front(handler, stream_buffer_bytes_max=20_000)
    client = await the_front.h2(INITIAL_WINDOW_SIZE=5000)
    small = await client.response(await client.request())
    assert (small.body, small.ended) == (b"last", True)
    assert (await client.response(await client.request(method="HEAD"))).body == b""
    is_over = False
    large = await client.request("/large")
    await the_front.settle()
    assert not is_over
    await client.credit(large, 95_000)
    await client.credit(0, 95_000)
    response = await client.response(large)
    assert (len(response.body), response.ended, is_over) == (100_000, True, True)


async def test_handler_that_sends_parts_of_a_response_out_of_order_gets_an_error(autojump_clock, front):
    async def handler(exchange):
        with pytest.raises(RuntimeError, match="not been started"):
            await exchange.send(b"x")
        with pytest.raises(ValueError, match="status is 99"):
            await exchange.start(99, [])
        await exchange.start(200, [])
        with pytest.raises(RuntimeError, match="already started"):
            await exchange.respond(200, [], b"")
        await exchange.finish()
        with pytest.raises(RuntimeError, match="already finished"):
            await exchange.send(b"x")

    client = await front(handler).h2()
    response = await client.response(await client.request())
    assert (response.status, response.ended) == (200, True)
