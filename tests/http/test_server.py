"""Tests the whole front end: draining, late streams, limits on connections, TLS, and real sockets."""

from __future__ import annotations

import functools
import ssl
from pathlib import Path

import httpcore
import httpx
import hyperframe.frame as frames
import pytest
import trio
import trustme
from h2.errors import ErrorCodes
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners, tls_context
from trioserve.http.server import FrontendServer


async def respond_ok(exchange):
    await exchange.respond(200, [("x-http-version", exchange.http_version)], b"ok")


async def echo_slowly(exchange):
    body = await exchange.body()
    await exchange.start(200, [("content-type", "text/event-stream")])
    for byte in body:
        await exchange.send(bytes([byte]))
    await exchange.finish()


class Gate:
    """A handler that starts a stream, and finishes it when the gate opens."""

    def __init__(self) -> None:
        self.open = trio.Event()

    async def __call__(self, exchange):
        await exchange.start(200, [])
        await exchange.send(b"begun")
        await self.open.wait()
        await exchange.send(b" and finished")
        await exchange.finish()


async def read_all(stream):
    received = b""
    while piece := await stream.receive_some():
        received += piece
    return received


# --- draining ---


async def test_drain_finishes_streams_and_refuses_later_streams_before_goaway(autojump_clock, front):
    gate = Gate()
    the_front = front(gate)
    client = await the_front.h2()
    running = await client.request()
    await client.until(lambda: client.responses[running].body == b"begun")
    the_front.server.drain()
    late = await client.request()
    assert (await client.response(late)).reset_code == ErrorCodes.REFUSED_STREAM
    assert client.goaways == []
    gate.open.set()
    assert (await client.response(running)).body == b"begun and finished"
    await client.until_eof()
    assert [(goaway.last_stream_id, goaway.error_code) for goaway in client.goaways] == [(late, 0)]
    await client.stream.aclose()
    await the_front.settle()
    assert the_front.connection_count == 0
    assert the_front.server.counters().streams_refused_total["draining"] == 1


HALVES_HTTP1 = {
    "body": b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\no",
    "body, none of it": b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n",
    "chunked body": b"POST / HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n9\r\no",
    "body behind a 100": b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n",
    "head": b"POST / HTTP/1.1\r\nhost: te",
}


@pytest.mark.parametrize("half", HALVES_HTTP1.values(), ids=HALVES_HTTP1)
async def test_drain_refuses_an_incomplete_request_at_once_on_http1(autojump_clock, front, watched, half):
    handler = watched(echo_slowly)
    the_front = front(handler)
    clients = [the_front.h11() for _ in range(3)]
    for client in clients:
        await client.raw(half)
    await the_front.settle()
    began_at = trio.current_time()
    the_front.server.drain()
    await the_front.settle()
    assert (the_front.server.counters().exchanges_open, handler.running) == (0, 0)
    for client in clients:
        received = await read_all(client.stream)
        received = received.removeprefix(b"HTTP/1.1 100 \r\n\r\n")
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in received.lower()
        assert b"x-trioserve-reason: draining" in received
    await the_front.settle()
    assert trio.current_time() == began_at
    await trio.sleep(1.1)  # The server waits for clients that do not close their side.
    assert the_front.connection_count == 0
    assert the_front.server.counters().streams_refused_total["draining"] == 3
    assert the_front.server.counters().exchanges_left_total == 0


async def test_drain_refuses_an_incomplete_request_at_once_on_http2(autojump_clock, front, watched):
    """Streams with incomplete requests are refused. A stream with a complete request continues."""
    gate = Gate()

    async def handle(exchange):
        await (gate(exchange) if exchange.path == "/whole" else echo_slowly(exchange))

    handler = watched(handle)
    the_front = front(handler)
    client = await the_front.h2()
    halves = [await client.request(body=body, end=False) for body in (b"o", b"")]
    whole = await client.request("/whole", body=b"one")
    await the_front.settle()
    the_front.server.drain()
    for half in halves:
        assert (await client.response(half)).reset_code == ErrorCodes.REFUSED_STREAM
    assert handler.running == 1
    gate.open.set()
    assert (await client.response(whole)).ended
    await client.until_eof()
    assert the_front.server.counters().streams_refused_total["draining"] == 2


async def test_drain_lets_the_handler_read_a_body_that_has_arrived(autojump_clock, front):
    """The handler reads the body after the drain has begun."""
    proceed = trio.Event()

    async def handler(exchange):
        await proceed.wait()
        await echo_slowly(exchange)

    the_front = front(handler)
    http2, plain, chunked = await the_front.h2(), the_front.h11(), the_front.h11()
    stream_id = await http2.request(body=b"onetwo")
    await plain.request(body=b"onetwo")
    await chunked.request(headers=(("transfer-encoding", "chunked"),), body=b"onetwo")
    await the_front.settle()
    the_front.server.drain()
    await the_front.settle()
    proceed.set()
    assert (await http2.response(stream_id)).body == b"onetwo"
    for client in (plain, chunked):
        assert (await client.response(next_cycle=False))[2] == b"onetwo"


async def test_drain_ends_idle_connections_at_once(autojump_clock, front):
    the_front = front(respond_ok)
    h2, h11, silent = await the_front.h2(), the_front.h11(), the_front.connect()
    await h2.response(await h2.request())
    await h11.request()
    await h11.response()
    began_at = trio.current_time()
    the_front.server.drain()
    await h2.until_eof()
    assert await h11.stream.receive_some() == b""
    assert await silent.receive_some() == b""
    assert [goaway.error_code for goaway in h2.goaways] == [0]
    for stream in (h2.stream, h11.stream, silent):
        await stream.aclose()
    await the_front.settle()
    assert trio.current_time() == began_at
    assert the_front.connection_count == 0


async def test_drain_closes_an_http1_connection_after_its_running_response(autojump_clock, front):
    gate = Gate()
    the_front = front(gate)
    client = the_front.h11()
    await client.request()
    await the_front.settle()
    the_front.server.drain()
    gate.open.set()
    assert (await client.response())[2] == b"begun and finished"
    assert await client.stream.receive_some() == b""


async def test_response_during_a_drain_has_connection_close(autojump_clock, front):
    begun, proceed = trio.Event(), trio.Event()

    async def handler(exchange):
        begun.set()
        await proceed.wait()
        await respond_ok(exchange)

    the_front = front(handler)
    client = the_front.h11()
    await client.request()
    await begun.wait()
    the_front.server.drain()
    proceed.set()
    status, headers, _ = await client.response(next_cycle=False)
    assert (status, headers["connection"]) == (200, "close")


async def test_cancelling_a_drain_resets_running_streams(autojump_clock, front):
    the_front = front(Gate())
    client = await the_front.h2()
    running = await client.request()
    await client.until(lambda: client.responses[running].body == b"begun")
    the_front.server.drain()
    await trio.sleep(30)
    the_front.cancel()
    await client.until_eof()
    assert client.responses[running].reset_code == ErrorCodes.CANCEL


async def test_drain_completes_if_the_client_also_sends_goaway(autojump_clock, front):
    gate = Gate()
    the_front = front(gate)
    client = await the_front.h2()
    running = await client.request()
    await client.send(frames.GoAwayFrame(0, last_stream_id=0))
    await the_front.settle()
    the_front.server.drain()
    gate.open.set()
    assert (await client.response(running)).body == b"begun and finished"


async def answer_or_wait(gate, exchange):
    """Wait for the gate at /wait, and echo the body at other paths."""
    if exchange.path == "/wait":
        await gate(exchange)
    else:
        await exchange.respond(200, [], await exchange.body())


async def test_http1_request_after_an_announced_drain_is_answered_and_its_connection_closed(autojump_clock, front):
    gate = Gate()
    the_front = front(functools.partial(answer_or_wait, gate))
    running, idle = the_front.h11(), the_front.h11()
    await running.request("/wait")
    await idle.request()
    await idle.response()
    await the_front.settle()
    the_front.server.announce_drain()
    for client in (idle, the_front.h11()):
        await client.request()
        status, headers, _ = await client.response(next_cycle=False)
        assert (status, headers["connection"]) == (200, "close")
        assert await client.stream.receive_some() == b""
    assert not the_front.server.draining
    gate.open.set()
    assert (await running.response())[2] == b"begun and finished"
    await the_front.server.wait_until_answered()
    assert await running.stream.receive_some() == b""


async def test_announced_drain_waits_for_an_incomplete_head_but_not_for_a_body(autojump_clock, front):
    the_front = front(echo_slowly)
    head, body = the_front.h11(), the_front.h11()
    await head.raw(b"GET / HTTP/1.1\r\nhost: te")
    await body.raw(HALVES_HTTP1["body"])
    await the_front.settle()
    the_front.server.announce_drain()
    assert (await read_all(body.stream)).startswith(b"HTTP/1.1 503 ")
    await the_front.settle()
    await head.raw(b"st\r\n\r\n")
    assert (await read_all(head.stream)).startswith(b"HTTP/1.1 200 ")


async def test_announced_drain_answers_new_streams_until_none_is_open(autojump_clock, front):
    gate = Gate()
    the_front = front(functools.partial(answer_or_wait, gate))
    client = await the_front.h2()
    running = await client.request("/wait")
    half = await client.request(body=b"o", end=False)
    await client.until(lambda: client.responses[running].body == b"begun")
    the_front.server.announce_drain()
    assert (await client.response(half)).reset_code == ErrorCodes.REFUSED_STREAM
    late = await client.request(body=b"late", end=False)
    await the_front.settle()
    await client.data(late, b" body", end=True)
    assert (await client.response(late)).body == b"late body"
    assert client.goaways == []
    gate.open.set()
    assert (await client.response(running)).body == b"begun and finished"
    await client.until_eof()
    assert [(goaway.last_stream_id, goaway.error_code) for goaway in client.goaways] == [(late, 0)]


async def test_announced_drain_waits_only_for_requests_that_began_before_it(autojump_clock, front):
    gate, late_gate = Gate(), Gate()

    async def handle(exchange):
        await (late_gate if exchange.path == "/late" else gate)(exchange)

    the_front = front(handle)
    h2, h11 = await the_front.h2(), the_front.h11()
    await h2.request()
    await h11.request()
    await the_front.settle()
    the_front.server.announce_drain()
    await (await the_front.h2()).request("/late")
    await the_front.h11().request("/late")
    await the_front.settle()
    with trio.move_on_after(1) as timeout:
        await the_front.server.wait_until_answered()
    assert timeout.cancelled_caught
    gate.open.set()
    await the_front.server.wait_until_answered()
    assert the_front.server.counters().exchanges_open == 2


@pytest.mark.parametrize("answers", [True, False], ids=["client answers the PING", "client answers nothing"])
async def test_goaway_follows_the_ping_after_the_last_response(autojump_clock, front, answers):
    gate = Gate()
    the_front = front(gate, close_seconds_max=1)
    client = await the_front.h2()
    running = await client.request()
    await the_front.settle()
    the_front.server.drain()
    gate.open.set()
    assert (await client.response(running)).body == b"begun and finished"
    ended_at = trio.current_time()
    await client.until(lambda: any(isinstance(each, frames.PingFrame) for each in client.frames))
    await the_front.settle()
    assert client.goaways == []
    if answers:
        (ping,) = [each for each in client.frames if isinstance(each, frames.PingFrame)]
        await client.send(frames.PingFrame(0, opaque_data=ping.opaque_data, flags=["ACK"]))
    await client.until_eof()
    assert [(goaway.last_stream_id, goaway.error_code) for goaway in client.goaways] == [(running, 0)]
    assert trio.current_time() - ended_at == pytest.approx(0 if answers else 1, abs=0.1)
    await client.stream.aclose()


class BusyClient(httpcore.AsyncNetworkBackend, httpcore.AsyncNetworkStream):
    """A connection of httpcore over a stream in memory, which is busy for a while before it reads."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.pause_seconds = 0.0

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ASYNC109
        return self

    async def read(self, max_bytes, timeout=None):  # noqa: ASYNC109
        received = await self.stream.receive_some(max_bytes)
        if received and self.pause_seconds:
            await trio.sleep(self.pause_seconds)
            with trio.move_on_after(0.01):
                received += await self.stream.receive_some(max_bytes)
        return received

    async def write(self, buffer, timeout=None):  # noqa: ASYNC109
        await self.stream.send_all(buffer)

    async def aclose(self):
        await self.stream.aclose()

    def get_extra_info(self, info):
        return None


async def test_httpcore_that_reads_late_loses_no_stream(autojump_clock, front):
    """All streams end at the same time. If httpcore read a GOAWAY together with their ends, it would drop all streams
    but one.
    """
    gate = Gate()
    the_front = front(gate, close_seconds_max=1)
    backend = BusyClient(the_front.connect())
    bodies = [b""] * 4

    async def ask(index: int) -> None:
        async with pool.stream("GET", "http://test/") as response:
            async for piece in response.aiter_stream():
                bodies[index] += piece

    async with (
        httpcore.AsyncConnectionPool(http1=False, http2=True, network_backend=backend) as pool,
        trio.open_nursery() as asking,
    ):
        for index in range(len(bodies)):
            asking.start_soon(ask, index)
        await the_front.settle()
        assert bodies == [b"begun"] * len(bodies)
        backend.pause_seconds = 0.5
        the_front.server.announce_drain()
        await wait_all_tasks_blocked()
        gate.open.set()
    assert bodies == [b"begun and finished"] * len(bodies)


# --- real sockets ---


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
async def test_streams_of_httpx_finish_while_the_server_drains(http2):
    """httpcore drops its streams when it reads a GOAWAY, so the server sends no GOAWAY while streams run."""
    gate = Gate()
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(gate)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        async with httpx.AsyncClient(http1=not http2, http2=http2, trust_env=False) as client:
            received = b""
            async with client.stream("GET", f"http://{addresses(listeners)[0]}/") as streamed:
                async for piece in streamed.aiter_bytes():
                    received += piece
                    if received == b"begun":
                        server.announce_drain()
                        await wait_all_tasks_blocked()
                        server.drain()
                        await wait_all_tasks_blocked()
                        gate.open.set()
            assert received == b"begun and finished"


async def test_listener_is_open_until_the_announced_drain_ends():
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(respond_ok)
    address = listeners[0].socket.getsockname()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        server.announce_drain()
        stream = await trio.open_tcp_stream(*address)
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert (await read_all(stream)).startswith(b"HTTP/1.1 200 ")
        await stream.aclose()
        server.drain()
        await wait_all_tasks_blocked()
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream(*address)


@pytest.mark.parametrize("http2", [False, True])
async def test_httpx_gets_responses_over_real_sockets(http2):
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(echo_slowly)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        async with httpx.AsyncClient(http1=not http2, http2=http2, trust_env=False) as client:
            url = f"http://{addresses(listeners)[0]}/"
            for _ in range(3):
                response = await client.post(url, content=b"hello")
                assert (response.status_code, response.content) == (200, b"hello")
                assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            async with client.stream("POST", url, content=bytes(1000)) as streamed:
                assert len(b"".join([piece async for piece in streamed.aiter_bytes()])) == 1000
        server.drain()
    counters = server.counters()
    assert (counters.connections_total, counters.connections_http2_total) == (1, int(http2))
    assert (counters.connections_open, counters.exchanges_total, counters.exchanges_left_total) == (0, 4, 0)


# httpcore drops a generator without closing it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole response"])
async def test_httpx_that_leaves_a_stream_over_http2_cancels_the_handler(watched, is_streamed):
    """httpcore sends neither RST_STREAM nor a close, and stops reading its socket."""

    async def begin_and_wait(exchange):
        if is_streamed:
            await exchange.start(200, [])
            await exchange.send(b"begun")
        await trio.sleep_forever()

    handler = watched(begin_and_wait)
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(handler, limits=FrontendLimits(ping_seconds=0.1, ping_answer_seconds_max=0.2))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        async with httpx.AsyncClient(http1=False, http2=True, trust_env=False) as client:
            async with trio.open_nursery() as asking:

                async def ask() -> None:
                    async with client.stream("GET", f"http://{addresses(listeners)[0]}/") as streamed:
                        async for _ in streamed.aiter_bytes():
                            break

                asking.start_soon(ask)
                await handler.begun.wait()
                if not is_streamed:
                    asking.cancel_scope.cancel()
            with trio.fail_after(30):
                await handler.ended.wait()
        server.drain()
    assert handler.cancelled
    assert server.counters().connections_refused_total["ping_unanswered"] == 1


async def test_tcp_reset_cancels_the_handler(watched):
    """Scenario S11 of tests/README.md: a killed client ends its request."""
    handler = watched()
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(handler)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        host, port = listeners[0].socket.getsockname()
        stream = await trio.open_tcp_stream(host, port)
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        await handler.begun.wait()
        stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        with trio.fail_after(5):
            await handler.ended.wait()
        server.drain()
    assert handler.cancelled


async def test_http_1_0_response_that_breaks_off_ends_in_a_tcp_reset(caplog):
    async def handler(exchange):
        await exchange.start(200, [])
        await exchange.send(b"some")
        raise ZeroDivisionError("a fault")

    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(handler)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        stream = await trio.open_tcp_stream(*listeners[0].socket.getsockname())
        await stream.send_all(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(5):
            await read_all(stream)
        await stream.aclose()
        server.drain()


async def test_response_413_reaches_a_client_that_still_sends_its_body():
    async def handler(exchange):
        await exchange.body()

    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(handler, limits=FrontendLimits(body_bytes_max=1000))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        stream = await trio.open_tcp_stream(*listeners[0].socket.getsockname())
        await stream.send_all(b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000\r\n\r\n")
        await stream.send_all(bytes(500_000))
        assert (await read_all(stream)).startswith(b"HTTP/1.1 413 ")
        await stream.aclose()
        server.drain()


async def test_drained_server_refuses_connections():
    gate = Gate()
    listeners = await open_listeners("127.0.0.1", 0)
    address = listeners[0].socket.getsockname()
    server = FrontendServer(gate)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        stream = await trio.open_tcp_stream(*address)
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        await stream.receive_some()
        server.drain()
        await wait_all_tasks_blocked()
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream(*address)
        gate.open.set()
        assert (await read_all(stream)).endswith(b" and finished\r\n0\r\n\r\n")
        await stream.aclose()


async def test_connections_beyond_the_limit_wait_until_another_ends():
    listeners = await open_listeners("127.0.0.1", 0)
    address = listeners[0].socket.getsockname()
    server = FrontendServer(respond_ok, limits=FrontendLimits(connections_max=2))
    request = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        streams = [await trio.open_tcp_stream(*address) for _ in range(3)]
        for stream in streams:
            await stream.send_all(request)
        for stream in streams[:2]:
            assert (await stream.receive_some()).endswith(b"ok")
        await wait_all_tasks_blocked()
        assert server.counters().connections_total == 2
        await streams[0].aclose()
        assert (await streams[2].receive_some()).endswith(b"ok")
        for stream in streams:
            await stream.aclose()
        server.drain()


# --- TLS ---


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_context(authority, tmp_path) -> ssl.SSLContext:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("test")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return tls_context(Path(certificate), Path(key))


def secured(stream, authority, protocols):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(protocols)
    return trio.SSLStream(stream, context, server_hostname="test", https_compatible=True)


@pytest.mark.parametrize("protocols", [["h2", "http/1.1"], ["http/1.1"], []])
async def test_tls_handshake_selects_http2_or_http1(
    autojump_clock, nursery, authority, server_context, h2_client, protocols
):
    server = FrontendServer(respond_ok, ssl_context=server_context)
    ours, theirs = memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs)
    stream = secured(ours, authority, protocols)
    await stream.do_handshake()
    assert stream.selected_alpn_protocol() == (protocols[0] if protocols else None)
    if "h2" in protocols:
        client = h2_client(stream)
        await client.open()
        response = await client.response(await client.request())
        assert (response.headers["x-http-version"], response.body) == ("2", b"ok")
    else:
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert (await stream.receive_some()).endswith(b"ok")
    await stream.aclose()
    await wait_all_tasks_blocked()
    assert server.counters().connections_open == 0


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x00\x05hello"], ids=["silent", "damaged"])
async def test_failed_or_unfinished_handshake_is_refused(autojump_clock, nursery, server_context, caplog, sent):
    server = FrontendServer(respond_ok, ssl_context=server_context, limits=FrontendLimits(tls_handshake_seconds_max=10))
    ours, theirs = memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs)
    began_at = trio.current_time()
    await ours.send_all(sent)
    await read_all(ours)
    assert trio.current_time() - began_at == pytest.approx(0 if sent else 10, abs=0.1)
    assert server.counters().connections_failed_total == 0
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


async def test_drain_ends_an_unfinished_tls_handshake_at_once(autojump_clock, nursery, server_context):
    server = FrontendServer(respond_ok, ssl_context=server_context)
    ours, theirs = memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs)
    began_at = trio.current_time()
    await ours.send_all(b"\x16\x03\x01")  # These are the first bytes of a ClientHello.
    await wait_all_tasks_blocked()
    server.drain()
    assert await read_all(ours) == b""
    assert trio.current_time() == began_at


async def test_leaving_over_tls_cancels_the_handler(autojump_clock, nursery, authority, server_context, watched):
    handler = watched()
    server = FrontendServer(handler, ssl_context=server_context)
    ours, theirs = memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs)
    stream = secured(ours, authority, ["http/1.1"])
    await stream.send_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    await handler.begun.wait()
    await ours.aclose()  # This closes the connection without TLS close_notify.
    assert await handler.passes_until_ended() < 10
    assert handler.cancelled


# --- faults of our own ---


async def test_fault_of_a_connection_ends_only_that_connection(autojump_clock, front, caplog, monkeypatch):
    the_front = front(respond_ok)
    client, other = await the_front.h2(), await the_front.h2()
    await other.response(await other.request())
    with monkeypatch.context() as patched:
        patched.setattr("trioserve.http.http2.connection.request_head", lambda event, peer: 1 / 0)
        await client.request()
        await client.until_eof()
    assert [record.getMessage() for record in caplog.records] == ["connection failed peer=test"]
    assert the_front.server.counters().connections_failed_total == 1
    assert (await other.response(await other.request())).body == b"ok"
