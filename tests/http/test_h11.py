"""Tests HTTP/1.1: requests, responses, keep-alive, pipelining, and invalid requests."""

from __future__ import annotations

import random

import h11
import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

from trioserve.http.http1.protocol import CHUNKS_A_PIECE_MAX, ChunkSizes

JSON = [("content-type", "application/json")]


async def echo(exchange):
    body = await exchange.body()
    await exchange.respond(
        200, [("x-path", exchange.path), ("x-query", exchange.query)], exchange.method.encode() + body
    )


async def respond_ok(exchange):
    await exchange.respond(200, [], b"ok")


async def read_all(stream):
    received = b""
    try:
        while piece := await stream.receive_some():
            received += piece
    except trio.BrokenResourceError:
        received += b"<broken off>"
    return received


async def test_request_reaches_the_handler_and_its_response_reaches_the_client(autojump_clock, front):
    client = front(echo).h11()
    await client.request("/v1/a%20b?c=d&e", body=b"hello")
    status, headers, body = await client.response()
    assert (status, body) == (200, b"POSThello")
    assert (headers["x-path"], headers["x-query"], headers["content-length"]) == ("/v1/a b", "c=d&e", "9")
    assert "date" in headers


async def test_http1_requests_follow_each_other_on_one_connection(autojump_clock, front):
    the_front = front(echo)
    client = the_front.h11()
    for number in range(5):
        await client.request(body=b"%d" % number)
        assert (await client.response())[2] == b"POST%d" % number
    assert the_front.server.counters().connections_total == 1


@pytest.mark.parametrize("connection", [None, "keep-alive", "Keep-Alive", "close", "close, te"])
async def test_connection_stays_open_unless_the_client_sends_close(autojump_clock, front, connection):
    client = front(respond_ok).h11()
    field = "" if connection is None else f"connection: {connection}\r\n"
    await client.raw(f"GET / HTTP/1.1\r\nhost: test\r\n{field}\r\n".encode())
    status, headers, body = await client.response()
    assert (status, body) == (200, b"ok")
    is_closed = connection is not None and "close" in connection
    assert (headers.get("connection") == "close") is is_closed
    if is_closed:
        assert await client.stream.receive_some() == b""
    else:
        await client.raw(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_requests_sent_in_one_write_are_answered_in_order(autojump_clock, front):
    client = front(echo).h11()
    await client.raw(
        b"POST /1 HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc"
        b"GET /2 HTTP/1.1\r\nhost: test\r\n\r\n"
        b"POST /3 HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
        b"GET /4 HTTP/1.1\r\nhost: test\r\n\r\n"
    )
    received = b""
    while received.count(b"HTTP/1.1 200") < 4 or not received.endswith(b"\r\n\r\nGET"):
        received += await client.stream.receive_some()
    assert [received.index(b"x-path: /%d" % number) for number in (1, 2, 3, 4)] == sorted(
        received.index(b"x-path: /%d" % number) for number in (1, 2, 3, 4)
    )
    assert [response[response.index(b"\r\n\r\n") + 4 :] for response in received.split(b"HTTP/1.1 200 OK")[1:]] == [
        b"POSTabc",
        b"GET",
        b"POSTx",
        b"GET",
    ]


async def test_wrong_content_length_of_a_handler_breaks_the_response_off(autojump_clock, front):
    async def handler(exchange):
        await exchange.respond(200, [("Content-Length", "5")], b"ok")

    client = front(handler).h11()
    await client.raw(b"GET / HTTP/1.1\r\nhost: test\r\n\r\nGET / HTTP/1.1\r\nhost: test\r\n\r\n")
    received = await read_all(client.stream)
    # The client would read a second response as the rest of the first response.
    assert received.count(b"HTTP/1.1 200") <= 1


async def test_chunked_request_body_gets_a_chunked_response(autojump_clock, front):
    async def handler(exchange):
        body = await exchange.body()
        await exchange.start(200, [])
        for byte in body:
            await exchange.send(bytes([byte]))
        await exchange.finish()

    client = front(handler).h11()
    for _ in range(2):
        await client.request(headers=(("transfer-encoding", "chunked"),), body=b"hello")
        status, headers, body = await client.response()
        assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"hello")


async def test_other_tasks_run_while_a_body_of_tiny_chunks_is_read(autojump_clock, front):
    turns = []

    async def count_turns(task_status) -> None:
        task_status.started()
        while True:
            turns.append(trio.current_time())
            await trio.lowlevel.checkpoint()

    async def read(exchange):
        async with trio.open_nursery() as nursery:
            await nursery.start(count_turns)
            body = await exchange.body()
            nursery.cancel_scope.cancel()
        await exchange.respond(200, [], b"%d" % len(body))

    client = front(read).h11()
    head = b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
    await client.raw(head + b"1\r\nx\r\n" * 3200 + b"0\r\n\r\n")
    assert (await client.response())[2] == b"3200"
    assert len(turns) >= 3200 // CHUNKS_A_PIECE_MAX


async def test_streamed_response_arrives_piece_by_piece(autojump_clock, front):
    proceed = trio.Event()

    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"one")
        await proceed.wait()
        await exchange.send(b"two")
        await exchange.finish()

    client = front(handler).h11()
    await client.request()
    assert isinstance(await client.event(), h11.Response)
    assert (await client.event()).data == b"one"
    proceed.set()
    assert (await client.event()).data == b"two"
    assert isinstance(await client.event(), h11.EndOfMessage)


async def test_head_request_gets_no_body_and_the_connection_stays_open(autojump_clock, front):
    client = front(echo).h11()
    await client.request(method="HEAD")
    status, headers, body = await client.response()
    assert (status, headers["content-length"], body) == (200, "4", b"")
    await client.request(body=b"x")
    assert (await client.response())[2] == b"POSTx"


async def test_expect_100_continue_is_answered_when_the_handler_reads_the_body(autojump_clock, front):
    client = front(echo).h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 100 ")
    await client.raw(b"abc")
    assert (await client.stream.receive_some()).endswith(b"POSTabc")


async def test_expect_100_continue_is_not_answered_when_the_body_is_too_large(autojump_clock, front):
    client = front(echo, body_bytes_max=1000).h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 1001\r\n\r\n")
    received = await read_all(client.stream)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in received


async def test_end_of_an_http_1_0_response_is_the_end_of_the_connection(autojump_clock, front):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"one")
        await exchange.send(b"two")
        await exchange.finish()

    stream = front(handler).connect()
    await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
    received = await read_all(stream)
    assert received.endswith(b"\r\n\r\nonetwo")
    assert b"chunked" not in received


async def test_upgrade_header_of_a_request_is_ignored(autojump_clock, front):
    client = front(echo).h11()
    for _ in range(2):
        await client.raw(
            b"GET / HTTP/1.1\r\nhost: test\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        )
        received = await client.stream.receive_some()
        assert received.startswith(b"HTTP/1.1 200 ")
        assert received.endswith(b"GET")


async def test_absolute_request_target_is_understood(autojump_clock, front):
    client = front(echo).h11()
    await client.request("http://elsewhere:80/path?query")
    _, headers, _ = await client.response()
    assert (headers["x-path"], headers["x-query"]) == ("/path", "query")


# --- pipelining ---


async def test_pipelined_requests_are_answered_in_order(autojump_clock, front):
    client = front(echo).h11()
    await client.raw(b"".join(b"GET /%d HTTP/1.1\r\nhost: test\r\n\r\n" % number for number in range(5)))
    received = b""
    while received.count(b"GET") < 5:
        received += await client.stream.receive_some()
    assert [received.index(b"x-path: /%d" % number) for number in range(5)] == sorted(
        received.index(b"x-path: /%d" % number) for number in range(5)
    )


async def test_too_many_pipelined_bytes_end_the_connection(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler, pipelined_bytes_max=10_000)
    client = the_front.h11()
    await client.raw(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    await the_front.settle()
    await client.raw(bytes(9_999))
    await the_front.settle()
    assert handler.running == 1
    await client.raw(b"xy")
    await handler.ended.wait()
    assert handler.cancelled
    await the_front.settle()
    assert the_front.connection_count == 0


# --- bodies ---


async def test_unread_body_is_skipped_and_the_connection_stays_open(autojump_clock, front):
    client = front(respond_ok).h11()
    for _ in range(2):
        await client.request(body=b"abc")
        assert (await client.response())[2] == b"ok"


async def test_response_before_the_end_of_the_body_closes_the_connection(autojump_clock, front):
    the_front = front(respond_ok)
    client = the_front.h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000\r\n\r\nabc")
    received = await client.stream.receive_some()
    assert b"connection: close" in received
    await client.raw(bytes(100_000))
    assert await read_all(client.stream) == b""
    await the_front.settle()
    await client.stream.aclose()
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_bytes_kept_of_an_unread_body_are_limited(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler, pipelined_bytes_max=70_000)
    client = the_front.h11()
    stream = the_front.connect(lockstep_stream_pair)
    await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 10000000\r\n\r\n")
    accepted = 0
    with trio.move_on_after(1):
        while True:
            await stream.send_all(bytes(10_000))
            accepted += 10_000
    assert 70_000 <= accepted <= 150_000
    await client.stream.aclose()


@pytest.mark.parametrize("chunks", [b"FFFFFFFF\r\n", b"7fffffff;x=y\r\nab", b"2\r\nab\r\n3E7\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
async def test_too_large_chunk_is_refused_before_its_bytes_arrive(autojump_clock, front, chunks, at_once, expects):
    client = front(echo, body_bytes_max=1000).h11()
    began_at = trio.current_time()
    sent = b"POST / HTTP/1.1\r\nhost: test\r\n" + expects + b"transfer-encoding: chunked\r\n\r\n" + chunks
    for piece in [sent] if at_once else [bytes([byte]) for byte in sent]:
        await client.raw(piece)
        await trio.testing.wait_all_tasks_blocked()
    received = (await client.stream.receive_some()).removeprefix(b"HTTP/1.1 100 \r\n\r\n")
    while b"connection: close" not in received.lower():
        received += await client.stream.receive_some()
    assert received.startswith(b"HTTP/1.1 413 ")
    assert trio.current_time() == began_at


@pytest.mark.parametrize("http", [1, 2])
async def test_too_large_content_length_is_refused_before_the_body_arrives(autojump_clock, front, http):
    the_front = front(echo, body_bytes_max=1000)
    began_at = trio.current_time()
    if http == 1:
        client = the_front.h11()
        await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1001\r\n\r\n")
        assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 413 ")
    else:
        client = await the_front.h2()
        stream_id = await client.request(headers=(("content-length", "1001"),), end=False)
        assert (await client.response(stream_id)).status == 413
    assert trio.current_time() == began_at


def test_chunk_sizes_of_a_body_agree_with_h11():
    """The bodies arrive complete, in pieces, or together with the next request. Broken framing ends the counting."""
    rng = random.Random(5)
    sizes = [1, 10, 255, 4096, 17]
    body = b"".join(b"%X%b\r\n" % (size, rng.choice((b"", b";a=b"))) + b"\n" * size + b"\r\n" for size in sizes)
    body += b"0\r\nx-trailer: 1\r\n\r\nFFFF\r\n"
    for piece_bytes in (1, 2, 3, 7, 100, len(body)):
        counted = ChunkSizes()
        for start in range(0, len(body), piece_bytes):
            counted.feed(body[start : start + piece_bytes])
        assert counted.announced_bytes == sum(sizes)
    for broken in (b"zz\r\nFFFF\r\n", b"x" * 2000 + b"\r\nFFFF\r\n", b"\r\nFFFF\r\n"):
        counted = ChunkSizes()
        counted.feed(broken)
        assert counted.announced_bytes == 0


async def test_request_body_beyond_the_limit_gets_413(autojump_clock, front):
    client = front(echo, body_bytes_max=1000).h11()
    await client.request(headers=(("transfer-encoding", "chunked"),), body=bytes(1001))
    status, _, body = await client.response(next_cycle=False)
    assert status == 413
    assert b'"type":"invalid_request_error"' in body


async def test_request_body_that_stops_arriving_gets_408(autojump_clock, front):
    client = front(echo, body_wait_seconds_max=5).h11()
    began_at = trio.current_time()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\nabc")
    assert (await read_all(client.stream)).startswith(b"HTTP/1.1 408 ")
    assert trio.current_time() - began_at == pytest.approx(5, abs=1.1)


# --- against the protocol ---


@pytest.mark.parametrize(
    "request_bytes, status",
    [
        (b"NOT HTTP AT ALL\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # The field `host` is missing.
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nhost: a\r\n folded: no\x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length : 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9" + b"9" * 1000 + b"\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx-a: 1\rx-b: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx-long: " + b"a" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx-long: " + b"a" * 5000, 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
    ],
)
async def test_malformed_request_gets_a_short_response_and_a_close(autojump_clock, front, request_bytes, status):
    the_front = front(respond_ok, head_bytes_max=4096)
    stream = the_front.connect()
    await stream.send_all(request_bytes)
    received = await read_all(stream)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert b'{"error":{"message":"' in received
    assert b"connection: close" in received.lower()
    await stream.aclose()
    await the_front.settle()
    assert the_front.connection_count == 0


async def test_malformed_chunk_gets_400(autojump_clock, front):
    client = front(echo).h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n")
    received = await read_all(client.stream)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in received


async def test_trailers_end_a_chunked_body_and_the_connection_stays_open(autojump_clock, front):
    client = front(echo).h11()
    for _ in range(2):
        await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.raw(b"3\r\nabc\r\n0\r\nx-checksum: 1\r\nauthorization: Bearer other\r\n\r\n")
        assert (await client.stream.receive_some()).endswith(b"POSTabc")


@pytest.mark.parametrize("endless", [b"0\r\n" + b"x-trailer: 1\r\n" * 1000, b"3;" + b"extension" * 1000])
async def test_trailers_and_chunk_extensions_without_end_are_refused(autojump_clock, front, endless):
    the_front = front(echo, head_bytes_max=4096)
    client = the_front.h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
    assert (await read_all(client.stream)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", [b"/\xff\xfe", b"/%ff%fe", b"/%00", b"/%0d%0aset-cookie:%20a", b"/%", b"/%ud83d"])
async def test_any_bytes_of_a_path_reach_the_handler_as_text(autojump_clock, front, target):
    async def handler(exchange):
        await exchange.respond(200, [], exchange.path.encode("utf-8"))

    the_front = front(handler)
    client = the_front.h11()
    await client.raw(b"GET " + target + b" HTTP/1.1\r\nhost: test\r\n\r\n")
    received = await client.stream.receive_some()
    # h11 refuses bytes outside of ASCII in a request target. Browsers escape such bytes.
    assert received.startswith(b"HTTP/1.1 400 " if not target.isascii() else b"HTTP/1.1 200 ")


async def test_path_cannot_forge_a_log_line(autojump_clock, front, caplog):
    async def handler(exchange):
        raise ZeroDivisionError("a fault")

    client = front(handler).h11()
    await client.request("/%0aERROR forged".replace(" ", "%20") + "%1b[2J" + "x" * 1000)
    await client.response()
    [record] = caplog.records
    message = record.getMessage()
    assert "path=/\\nERROR forged\\x1b[2Jxxx" in message
    assert len(message) < 300


# --- time ---


@pytest.mark.parametrize("requests", [0, 1])
async def test_idle_http1_connection_is_closed(autojump_clock, front, requests):
    client = front(respond_ok, idle_seconds_max=60, sniff_seconds_max=60).h11()
    for _ in range(requests):
        await client.request()
        await client.response()
    began_at = trio.current_time()
    assert await client.stream.receive_some() == b""
    assert trio.current_time() - began_at == pytest.approx(60, abs=0.1)


async def test_request_head_that_stops_arriving_gets_408(autojump_clock, front):
    client = front(respond_ok, head_seconds_max=5).h11()
    await client.raw(b"GET / HTTP/1.1\r\nho")
    began_at = trio.current_time()
    received = await client.stream.receive_some()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert trio.current_time() - began_at == pytest.approx(5, abs=0.1)


async def test_request_body_that_never_ends_gets_408_even_at_a_steady_rate(autojump_clock, front):
    the_front = front(echo, body_wait_seconds_max=60)
    client = the_front.h11()
    await client.raw(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n")
    began_at = trio.current_time()
    with pytest.raises(trio.BrokenResourceError):
        while True:
            await client.raw(b"x")
            await trio.sleep(1)
    assert trio.current_time() - began_at == pytest.approx(60, abs=2.1)
    assert (await client.stream.receive_some()).startswith(b"HTTP/1.1 408 ")


async def test_slow_sender_of_a_body_is_served(autojump_clock, front):
    client = front(echo, head_seconds_max=100).h11()
    for byte in b"POST /slow HTTP/1.1\r\nhost: test\r\ncontent-length: 3\r\n\r\nabc":
        await client.raw(bytes([byte]))
        await trio.sleep(1)
    assert (await client.stream.receive_some()).endswith(b"POSTabc")


# --- faults of handlers ---


async def test_exception_before_the_response_is_a_500_and_the_connection_stays_open(autojump_clock, front, caplog):
    async def handler(exchange):
        if exchange.path == "/bad":
            raise ZeroDivisionError("a fault")
        await respond_ok(exchange)

    client = front(handler).h11()
    await client.request("/bad")
    assert (await client.response())[0] == 500
    await client.request("/good")
    assert (await client.response())[0] == 200
    assert [record.getMessage() for record in caplog.records] == ["handler failed method=POST path=/bad"]


@pytest.mark.parametrize("fault", [True, False])
async def test_client_notices_that_an_incomplete_response_breaks_off(autojump_clock, front, caplog, fault):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"some")
        if fault:
            raise ZeroDivisionError("a fault")

    the_front = front(handler)
    client = the_front.h11()
    await client.request()
    with pytest.raises(h11.RemoteProtocolError):
        await client.response()
    await the_front.settle()
    assert the_front.connection_count == 0


@pytest.mark.parametrize("pair", [memory_stream_pair, lockstep_stream_pair])
async def test_large_response_arrives_whole(autojump_clock, front, h11_client, pair):
    async def handler(exchange):
        await exchange.respond(200, [], bytes(range(256)) * 2000)

    client = h11_client(front(handler).connect(pair))
    await client.request()
    assert (await client.response())[2] == bytes(range(256)) * 2000
    await client.stream.aclose()


async def test_chunks_of_a_response_have_the_same_bytes_as_chunks_of_h11(autojump_clock, front):
    pieces = [b"x", b"y" * 255, b"z" * 5000]

    async def handler(exchange):
        await exchange.start(200, [])
        for piece in pieces:
            await exchange.send(piece)
        await exchange.finish()

    client = front(handler).h11()
    await client.raw(b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    received = b""
    while piece := await client.stream.receive_some():
        received += bytes(piece)
    assert received.partition(b"\r\n\r\n")[2] == b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


async def test_last_bytes_and_end_of_a_response_are_sent_in_one_write(autojump_clock, front, h11_client):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.finish(b"last")

    client = h11_client(front(handler).connect(lockstep_stream_pair))  # Each read of this stream returns a whole write.
    await client.request()
    assert bytes(await client.stream.receive_some()).endswith(b"\r\n\r\n")
    assert bytes(await client.stream.receive_some()) == b"4\r\nlast\r\n0\r\n\r\n"
    await client.stream.aclose()


async def test_head_request_does_not_get_the_last_bytes_of_finish(autojump_clock, front):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.finish(b"last")

    client = front(handler).h11()
    for method, body in (("HEAD", b""), ("GET", b"last")):
        await client.request(method=method)
        assert (await client.response())[2] == body


async def test_http_1_0_client_gets_a_body_without_chunks(autojump_clock, front):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"one")
        await exchange.finish(b"two")

    client = front(handler).h11()
    await client.raw(b"GET / HTTP/1.0\r\nhost: test\r\n\r\n")
    received = b""
    while piece := await client.stream.receive_some():
        received += bytes(piece)
    assert received.partition(b"\r\n\r\n")[2] == b"onetwo"
