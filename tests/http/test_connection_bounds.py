"""Tests limits on connections and on the requests of all connections, TCP options, and failed accepts."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from h2.errors import ErrorCodes
from trio.testing import lockstep_stream_pair, memory_stream_pair

from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import open_listeners, open_unix_listener
from trioserve.http.server import FrontendServer
from trioserve.testing.memory_server import open_memory_server
from trioserve.trio_tools.connection_limit import Place

HALF_A_BODY = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{"
REQUEST = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


async def respond_ok(exchange):
    await exchange.respond(200, [], b"ok")


@asynccontextmanager
async def listening(handler, *, knows_caller=None, **limits) -> AsyncIterator[tuple[FrontendServer, tuple[str, int]]]:
    """Run a server on a real socket. At the end it drains, and all clients must have closed their connections."""
    listeners = await open_listeners("127.0.0.1", 0)
    server = FrontendServer(handler, limits=FrontendLimits(**limits), knows_caller=knows_caller)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, listeners)
        with trio.fail_after(30):
            yield server, listeners[0].socket.getsockname()
        server.drain()
    assert server.counters().connections_open == 0


async def ask(stream) -> None:
    await stream.send_all(REQUEST)
    assert (await stream.receive_some()).endswith(b"ok")


@pytest.mark.parametrize("first_asks", [True, False])
async def test_connection_that_is_idle_longest_ends_for_a_new_connection(first_asks):
    limits = {
        "connections_max": 2,
        "crowded_idle_seconds_min": 1e-6,
        "crowded_head_seconds_min": 1e-6,
        "close_seconds_max": 1000,
    }
    async with listening(respond_ok, **limits) as (server, address):
        first, second = [await trio.open_tcp_stream(*address) for _ in range(2)]
        if first_asks:  # In the other case, the client is silent, and its protocol is unknown.
            await ask(first)
        while server.counters().connections_total < 2:
            await trio.lowlevel.checkpoint()
        await ask(second)
        third = await trio.open_tcp_stream(*address)
        await ask(third)
        assert await first.receive_some() == b""
        await ask(second)
        assert server.counters().connections_refused_total["crowded"] == 1
        for stream in (first, second, third):
            await stream.aclose()


@pytest.mark.slow
async def test_connection_with_a_request_is_not_ended_until_it_is_idle():
    proceed = trio.Event()

    async def handler(exchange):
        if exchange.path == "/wait":
            await proceed.wait()
        await respond_ok(exchange)

    async with listening(handler, connections_max=1, crowded_idle_seconds_min=1e-6) as (server, address):
        first = await trio.open_tcp_stream(*address)
        await first.send_all(REQUEST.replace(b"/ ", b"/wait "))
        while not server.counters().exchanges_open:
            await trio.lowlevel.checkpoint()
        second = await trio.open_tcp_stream(*address)
        await second.send_all(REQUEST)
        # The time is three times the interval at which the server looks for a connection to end.
        with trio.move_on_after(0.3):
            await second.receive_some()
            raise AssertionError("there was no place for it")
        proceed.set()
        assert (await first.receive_some()).endswith(b"ok")
        assert (await second.receive_some()).endswith(b"ok")
        for stream in (first, second):
            await stream.aclose()


HALF_HEADS = [
    REQUEST[:20],
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\1\1\0\0\0\0\1\x82",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
]


@pytest.mark.parametrize("sent", HALF_HEADS, ids=["HTTP/1.1", "HTTP/2", "HTTP/2 without a request"])
async def test_connection_with_an_incomplete_head_ends_for_a_new_connection(sent):
    limits = {
        "connections_max": 1,
        "crowded_head_seconds_min": 1e-6,
        "crowded_idle_seconds_min": 1e-6,
        "head_seconds_max": 1000,
        "idle_seconds_max": 1000,
    }
    async with listening(respond_ok, **limits) as (server, address):
        slow = await trio.open_tcp_stream(*address)
        await slow.send_all(sent)
        await wait_until(lambda: server.counters().connections_open)
        new = await trio.open_tcp_stream(*address)
        await ask(new)
        with suppress(trio.BrokenResourceError):
            while await slow.receive_some():
                pass
        assert server.counters().connections_refused_total["crowded"] == 1
        for stream in (slow, new):
            await stream.aclose()


async def test_connection_selected_for_closing_is_closed_even_if_its_first_bytes_arrive(autojump_clock):
    server = FrontendServer(respond_ok)
    ours, theirs = memory_stream_pair()
    place = Place(None)

    async def end_with_the_first_bytes(stream, peer):
        made = await identify(stream, peer)
        place.is_ending = True  # A new connection would set this attribute. No checkpoint follows inside of the scope.
        place.end()
        return made

    identify, server._identify = server._identify, end_with_the_first_bytes
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(server.serve_connection, theirs, place=place))
        await ours.send_all(REQUEST[:20])
        with trio.fail_after(1), suppress(trio.BrokenResourceError):
            assert await ours.receive_some() == b""
    await ours.aclose()


async def wait_until(condition) -> None:
    while not condition():
        await trio.lowlevel.checkpoint()


KEY = "Bearer k"
KEYED = REQUEST.replace(b"host", b"authorization: Bearer k\r\nhost")


def knows(headers) -> bool:
    return headers.get("authorization") == KEY


@pytest.mark.parametrize("is_http2", [False, True])
async def test_connection_with_a_known_key_is_not_closed_in_favour_of_connections_without_a_key(is_http2, h2_client):
    limits = {"connections_max": 4, "crowded_idle_seconds_min": 1e-6, "crowded_head_seconds_min": 1e-6}
    async with listening(respond_ok, knows_caller=knows, **limits) as (server, address):
        known = await trio.open_tcp_stream(*address)
        if is_http2:
            client = h2_client(known)
            await client.open()
            await client.response(await client.request(headers=(("authorization", KEY),)))
        else:
            await known.send_all(KEYED)
            assert (await known.receive_some()).endswith(b"ok")
        strangers = []
        for _ in range(12):
            strangers.append(await trio.open_tcp_stream(*address))
            await ask(strangers[-1])
        counters = server.counters()
        assert (counters.connections_known_open, counters.connections_max) == (1, 4)
        assert counters.connections_refused_total["crowded"] == 9
        if is_http2:
            await client.response(await client.request(headers=(("authorization", KEY),)))
        else:
            await known.send_all(KEYED)
            assert (await known.receive_some()).endswith(b"ok")
        for stream in (known, *strangers):
            await stream.aclose()


@pytest.mark.parametrize("is_http2", [False, True])
async def test_connection_with_a_long_request_without_a_key_ends_if_keys_are_required(is_http2, h2_client):
    async def handler(exchange):
        if exchange.path == "/wait":
            await exchange.start(200, [])
            await trio.sleep_forever()
        await respond_ok(exchange)

    limits = {"connections_max": 1, "crowded_exchange_seconds_min": 1e-6, "close_seconds_max": 0.01}
    async with listening(handler, knows_caller=knows, **limits) as (server, address):
        slow = await trio.open_tcp_stream(*address)
        if is_http2:
            client = h2_client(slow)
            await client.open()
            await client.request("/wait")
        else:
            await slow.send_all(REQUEST.replace(b"/ ", b"/wait "))
        await wait_until(lambda: server.counters().exchanges_open)
        new = await trio.open_tcp_stream(*address)
        await new.send_all(KEYED)
        assert (await new.receive_some()).endswith(b"ok")
        assert server.counters().exchanges_open == 0
        for stream in (slow, new):
            await stream.aclose()


async def test_one_address_cannot_use_all_connections():
    async with listening(respond_ok, connections_max=4, connections_per_address_max=2) as (_, address):
        first, second, third = [await connect_from("127.0.0.1", address) for _ in range(3)]
        await ask(second)
        await ask(third)  # The server has closed the oldest connection of this address for this new connection.
        with suppress(trio.BrokenResourceError):
            assert await first.receive_some() == b""
        other = await connect_from("127.0.0.2", address)
        await ask(other)
        for stream in (first, second, third, other):
            await stream.aclose()


async def test_address_with_requests_on_all_its_connections_is_refused_and_counted():
    async def handler(exchange):
        if exchange.path == "/wait":
            await trio.sleep_forever()
        await respond_ok(exchange)

    async with listening(handler, connections_max=4, connections_per_address_max=1) as (server, address):
        first = await connect_from("127.0.0.1", address)
        await first.send_all(REQUEST.replace(b"/ ", b"/wait "))
        await wait_until(lambda: server.counters().exchanges_open)
        second = await connect_from("127.0.0.1", address)
        with suppress(trio.BrokenResourceError):
            assert await second.receive_some() == b""
        assert server.counters().connections_refused_total["address"] == 1
        other = await connect_from("127.0.0.2", address)
        await ask(other)
        for stream in (first, second, other):
            await stream.aclose()


async def test_one_address_cannot_use_all_connections_with_requests_if_no_keys_are_required():
    limits = {"connections_max": 4, "connections_per_address_max": 2}
    async with (
        open_memory_server() as served,
        listening(served.app, knows_caller=served.app.knows_caller, **limits) as (server, address),
    ):
        streams = []
        for count in (1, 2):
            streams.append(await connect_from("127.0.0.1", address))
            await streams[-1].send_all(HALF_A_BODY)
            await wait_until(lambda count=count: server.counters().exchanges_open == count)
        third = await connect_from("127.0.0.1", address)
        with suppress(trio.BrokenResourceError):
            assert await third.receive_some() == b""
        assert server.counters().connections_refused_total["address"] == 1
        assert server.counters().connections_known_open == 0
        for stream in (*streams, third):
            await stream.aclose()


async def connect_from(host: str, address: tuple[str, int]) -> trio.SocketStream:
    connecting = trio.socket.socket()
    await connecting.bind((host, 0))
    await connecting.connect(address)
    return trio.SocketStream(connecting)


async def test_unix_socket_has_no_bound_by_address(tmp_path):
    listener = await open_unix_listener(tmp_path / "socket")
    server = FrontendServer(respond_ok, limits=FrontendLimits(connections_max=8, connections_per_address_max=1))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [listener])
        streams = [await trio.open_unix_socket(tmp_path / "socket") for _ in range(5)]
        for stream in streams:
            await ask(stream)
        for stream in streams:
            await stream.aclose()
        server.drain()


async def test_idle_http_2_connection_ends_with_a_goaway_for_a_new_connection(h2_client):
    limits = {"connections_max": 1, "crowded_idle_seconds_min": 1e-6, "close_seconds_max": 1000}
    async with listening(respond_ok, **limits) as (_, address):
        client = h2_client(await trio.open_tcp_stream(*address))
        await client.open()
        await client.response(await client.request())
        other = await trio.open_tcp_stream(*address)
        await ask(other)  # The request works although the first client has not closed its side.
        await client.until_eof()
        assert [goaway.error_code for goaway in client.goaways] == [ErrorCodes.NO_ERROR]
        await client.stream.aclose()
        await other.aclose()


async def test_connection_is_no_longer_counted_however_its_client_leaves():
    """Scenario S48 of tests/README.md: the server accepts one connection at a time, and clients leave in each phase of
    a request.
    """

    async def handler(exchange):
        await exchange.body()
        await exchange.start(200, [])
        await exchange.send(b"begun")
        await trio.sleep_forever()

    phases = [b"", b"GET", b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\nabc", REQUEST, REQUEST * 2]
    async with listening(handler, connections_max=1, crowded_idle_seconds_min=1000) as (server, address):
        for sent in phases * 4:
            stream = await trio.open_tcp_stream(*address)
            await stream.send_all(sent)
            if sent.startswith(REQUEST):
                received = b""
                while b"begun" not in received:
                    received += await stream.receive_some()
            await stream.aclose()
        last = await trio.open_tcp_stream(*address)
        await last.send_all(REQUEST)
        assert (await last.receive_some()).startswith(b"HTTP/1.1 200")
        await last.aclose()
    assert server.counters().exchanges_open == 0


async def test_requests_of_all_connections_together_are_bounded(autojump_clock, front, watched):
    handler = watched()
    the_front = front(handler, exchanges_max=3)
    one, other, http1 = await the_front.h2(), await the_front.h2(), the_front.h11()
    for client in (one, one, other):
        await client.request()
    await the_front.settle()
    refused = await other.request()
    assert (await other.response(refused)).reset_code == ErrorCodes.REFUSED_STREAM
    await http1.request()
    status, headers, body = await http1.response(next_cycle=False)
    assert (status, headers["retry-after"], headers["x-trioserve-reason"]) == (503, "1", "exchanges_max")
    assert b'"type":"server_error"' in body
    assert handler.running == 3
    assert the_front.server.counters().streams_refused_total["exchanges_max"] == 2
    await one.stream.aclose()
    await the_front.settle()
    await other.request()
    await the_front.settle()
    assert handler.running == 2


async def test_a_share_of_the_exchanges_is_reserved_for_callers_with_a_key(autojump_clock, front, watched):
    """Callers without an API key get half of the exchanges. Callers with a key get all free exchanges."""
    handler = watched()
    the_front = front(handler, exchanges_max=4)
    the_front.server = FrontendServer(
        handler,
        limits=FrontendLimits(exchanges_max=4),
        knows_caller=lambda headers: headers.get("authorization") == "Bearer k",
    )
    key = (("authorization", "Bearer k"),)
    http2, http1 = await the_front.h2(), the_front.h11()
    unknown = [await http2.request() for _ in range(2)]
    await the_front.settle()
    assert (await http2.response(await http2.request())).reset_code == ErrorCodes.REFUSED_STREAM
    await http1.request()
    status, headers, body = await http1.response(next_cycle=False)
    assert (status, headers["retry-after"], headers["x-trioserve-reason"]) == (503, "1", "unknown_callers")
    assert b"send a key" in body
    await http2.request(headers=key)
    http1 = the_front.h11()
    await http1.request(headers=key)
    await the_front.settle()
    counters = the_front.server.counters()
    assert (handler.running, counters.exchanges_open, counters.exchanges_unknown_open) == (4, 4, 2)
    assert (await http2.response(await http2.request(headers=key))).reset_code == ErrorCodes.REFUSED_STREAM
    assert the_front.server.counters().streams_refused_total == {
        "draining": 0,
        "exchanges_max": 1,
        "streams_max": 0,
        "unknown_callers": 2,
        "websockets_max": 0,
        "websockets_per_caller": 0,
    }
    await http2.reset(unknown[0])
    await the_front.settle()
    await http2.request()  # The request gets the slot of the request that ended.
    await the_front.settle()
    assert (handler.running, the_front.server.counters().exchanges_unknown_open) == (4, 2)
    for stream in (http1.stream, http2.stream):
        await stream.aclose()
    await the_front.settle()
    assert the_front.server.counters().exchanges_unknown_open == 0


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # The preface is followed by empty SETTINGS.
LONG_HEAD = b"GET / HTTP/1.1\r\nhost: test\r\nx-long: " + b"a" * 5000


@pytest.mark.parametrize(
    "sent, reason",
    [
        (b"", "silent"),
        (b"PRI * HTTP/2.0\r\n", "silent"),
        (b"GET / HTT", "head_timeout"),
        (PREFACE + b"\0\0\1\1\0\0\0\0\1\x82", "head_timeout"),
        (LONG_HEAD, "head_too_large"),
        (PREFACE + b"\0\x20\0\1\0\0\0\0\1" + bytes(8192), "head_too_large"),
        (b"nonsense\r\n\r\n", "malformed"),
        (PREFACE + b"\0\0\1\0\0\0\0\0\1x", "malformed"),
        (PREFACE + b"\xff\xff\xff\0\0\0\0\0\1", "frame_too_large"),
        (REQUEST + bytes(100_000), "sent_ahead"),
    ],
)
async def test_every_refusal_of_a_connection_is_counted_with_its_reason(autojump_clock, front, watched, sent, reason):
    the_front = front(watched(), head_bytes_max=4096)
    stream = the_front.connect()
    await stream.send_all(sent)
    while await stream.receive_some():
        pass
    refused = the_front.server.counters().connections_refused_total
    assert {name: count for name, count in refused.items() if count} == {reason: 1}


# In HTTP/2, the acknowledgement of SETTINGS is the first frame that cannot be sent.
@pytest.mark.parametrize("sent", [REQUEST, PREFACE])
async def test_client_that_reads_nothing_is_counted_as_stalled(autojump_clock, front, sent):
    async def handler(exchange):
        await exchange.start(200, [])
        while True:
            await exchange.send(bytes(1000))

    the_front = front(handler, stall_seconds_max=30)
    stream = the_front.connect(lockstep_stream_pair)
    await stream.send_all(sent)
    await trio.sleep(31)
    assert the_front.server.counters().connections_refused_total["stalled"] == 1
    await stream.aclose()


# --- half-open connections ---


@pytest.mark.parametrize(("vanished", "stall", "unacknowledged"), [(12, 7, 12), (30, 60, 60)])
async def test_tcp_notices_a_machine_that_vanished(monkeypatch, vanished, stall, unacknowledged):
    """Scenario S11 of tests/README.md: keepalive ends a silent connection. Unacknowledged bytes time out, but not
    before the stall limit.
    """
    options: dict[str, int] = {}
    serve_connection = FrontendServer.serve_connection

    async def look(self, stream, *, peer, place):
        options["keepalive"] = stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
            options[name] = stream.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        await serve_connection(self, stream, peer=peer, place=place)

    monkeypatch.setattr(FrontendServer, "serve_connection", look)
    async with listening(respond_ok, stall_seconds_max=stall, vanished_seconds_max=vanished) as (_, address):
        stream = await trio.open_tcp_stream(*address)
        await ask(stream)
        await stream.aclose()
    assert options["keepalive"]
    assert options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"] == vanished
    assert options["TCP_USER_TIMEOUT"] == unacknowledged * 1000


# --- accepts that fail ---


class BadListener:
    """A listener whose accept() first fails with each of the errors, then returns a stream, then waits."""

    def __init__(self, *errors: int, stream: trio.abc.Stream) -> None:
        self.socket = socket.socket()
        self._errors = list(errors)
        self._streams = [stream]

    async def accept(self):
        await trio.lowlevel.checkpoint()
        if self._errors:
            raise OSError(self._errors.pop(0), "accept failed")
        if self._streams:
            return self._streams.pop()
        return await trio.sleep_forever()


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EMFILE, errno.ENOBUFS])
async def test_accept_that_fails_does_not_end_the_server(autojump_clock, nursery, number):
    ours, theirs = memory_stream_pair()
    theirs.setsockopt = lambda *arguments: None
    theirs.socket = socket.socket()
    server = FrontendServer(respond_ok)
    await nursery.start(server.serve, [BadListener(number, number, stream=theirs)])
    await ask(ours)
    theirs.socket.close()
    await ours.aclose()
    nursery.cancel_scope.cancel()


async def test_accept_on_a_broken_listener_raises_an_error(autojump_clock):
    with pytest.raises(BaseExceptionGroup) as caught:
        await FrontendServer(respond_ok).serve([BadListener(errno.EINVAL, stream=memory_stream_pair()[0])])
    assert caught.group_contains(OSError, match="accept failed")
