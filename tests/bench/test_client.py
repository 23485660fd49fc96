"""Tests of both HTTP clients: complete responses, their times, and immediate disconnects."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
import trio
import trio.testing
import trustme

from trioserve.bench.client import Client, FailureKind, Http1Client, Http2Client, receive, stream_opener
from trioserve.bench.settings import Target

both = pytest.mark.parametrize("http", [1, 2])


class Ear:
    """A listener that records a response, and disconnects after `leave_after` bytes."""

    def __init__(self, leave_after: int | None = None) -> None:
        self.status: int | None = None
        self.data = b""
        self.times: list[float] = []
        self.leave_after = leave_after
        self.first = trio.Event()

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self.data += data
        self.times.append(now_seconds)
        self.first.set()
        return self.leave_after is None or len(self.data) < self.leave_after


@contextlib.asynccontextmanager
async def open_client(http, open_stream, connections=1):
    async with trio.open_nursery() as nursery:
        headers = [("authorization", "Bearer key")]
        client: Client
        if http == 1:
            client = Http1Client(open_stream, [("host", "h"), *headers])
        else:
            client = Http2Client(nursery, open_stream, headers, scheme="http", authority="h", connections=connections)
        yield client
        await client.aclose()
        nursery.cancel_scope.cancel()


def post(client, ear, body=b'{"stream": true}'):
    return client.request("POST", "/p", body, ear)


async def respond_twice_a_second(call):
    await call.start(200)
    await trio.sleep(0.5)
    await call.send(b"first ")
    await trio.sleep(0.5)
    await call.send(b"second")
    await call.finish()


async def respond_for_ever(call):
    await call.start(200)
    while True:
        await call.send(b"0123456789")
        await trio.sleep(1)


@both
async def test_listener_gets_each_piece_with_its_time(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    async with open_client(http, server.open_stream) as client:
        ear = Ear()
        began_at = trio.current_time()
        assert await post(client, ear) is None
    assert (ear.status, ear.data) == (200, b"first second")
    assert [time - began_at for time in ear.times] == pytest.approx([0.5, 1.0])
    assert server.calls[0].headers["authorization"] == "Bearer key"
    assert server.calls[0].path == "/p"


@both
async def test_response_in_single_bytes_is_read_equally(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    server.piece_bytes = 1
    async with open_client(http, server.open_stream) as client:
        ear = Ear()
        assert await post(client, ear) is None
    assert (ear.status, ear.data) == (200, b"first second")


@both
async def test_bench_client_reuses_idle_connections(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    async with open_client(http, server.open_stream) as client:
        for _ in range(3):
            assert await post(client, Ear()) is None
    assert server.connection_count == 1


@pytest.mark.parametrize("http, connections, opened", [(1, 1, 4), (2, 1, 1), (2, 2, 2), (2, 9, 4)])
async def test_requests_share_connections_only_over_http2(start_server, autojump_clock, http, connections, opened):
    server = start_server(respond_twice_a_second, http=http)
    async with open_client(http, server.open_stream, connections) as client, trio.open_nursery() as nursery:
        ears = [Ear() for _ in range(4)]
        for ear in ears:
            nursery.start_soon(post, client, ear)
    assert server.connection_count == opened
    assert [ear.data for ear in ears] == [b"first second"] * 4


@both
async def test_long_body_is_sent_whole_through_small_windows(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    server.window_bytes = 1000
    body = b'{"stream": true, "prompt": "' + bytes(b"abcdefg"[i % 7] for i in range(300_000)) + b'"}'
    async with open_client(http, server.open_stream) as client:
        assert await post(client, Ear(), body) is None
    assert server.calls[0].raw_body == body


@pytest.mark.parametrize("http, how", [(1, "close"), (2, "reset CANCEL")])
async def test_cancelled_request_leaves_at_once(start_server, autojump_clock, http, how):
    server = start_server(respond_for_ever, http=http)
    async with open_client(http, server.open_stream) as client:
        ear = Ear()
        with trio.move_on_after(2.5):
            await post(client, ear)
        cancelled_at = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert (server.calls[0].left, server.calls[0].left_at) == (how, cancelled_at)
    assert ear.data == b"0123456789" * 3


@pytest.mark.parametrize("http, how", [(1, "close"), (2, "reset CANCEL")])
async def test_listener_that_returns_false_leaves_at_once(start_server, autojump_clock, http, how):
    server = start_server(respond_for_ever, http=http)
    async with open_client(http, server.open_stream) as client:
        ear = Ear(leave_after=20)
        assert await post(client, ear) is None
        left_at = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert (server.calls[0].left, server.calls[0].left_at) == (how, left_at)
        assert ear.data == b"0123456789" * 2


async def test_leaving_one_stream_does_not_affect_the_others(start_server, autojump_clock):
    server = start_server(respond_twice_a_second, http=2)
    async with open_client(2, server.open_stream) as client, trio.open_nursery() as nursery:
        ear = Ear()
        nursery.start_soon(post, client, ear)
        with trio.move_on_after(0.7):
            await post(client, Ear())
        assert await post(client, Ear()) is None
        assert ear.data == b"first second"
        assert server.connection_count == 1
        assert sorted(call.left or "" for call in server.calls) == ["", "", "reset CANCEL"]


@both
async def test_withheld_bytes_of_the_body_are_never_sent(autojump_clock, http):
    client_end, server_end = trio.testing.memory_stream_pair()

    async def open_stream():
        return client_end

    async def listen(client):
        with trio.move_on_after(1):
            await client.request("POST", "/p", b"0123456789", Ear(), withheld_bytes=4)
            pytest.fail("a request whose body is not complete has no response")

    received = b""
    async with open_client(http, open_stream) as client, trio.open_nursery() as nursery:
        if http == 2:
            settings = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
            settings.initiate_connection()
            await server_end.send_all(settings.data_to_send())
        nursery.start_soon(listen, client)
        with trio.move_on_after(2):
            while data := await server_end.receive_some():
                received += data
    if http == 1:
        head, _, body = received.partition(b"\r\n\r\n")
        assert b"content-length: 10" in head.lower()
        assert body == b"012345"
    else:
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        server.initiate_connection()
        events = server.receive_data(received)
        assert b"".join(event.data for event in events if isinstance(event, h2.events.DataReceived)) == b"012345"
        assert not any(isinstance(event, h2.events.StreamEnded) for event in events)
        assert isinstance(events[-1], h2.events.StreamReset)


async def test_hang_up_ends_all_requests_and_the_next_request_opens_a_connection(start_server, autojump_clock):
    server = start_server(respond_twice_a_second, http=2)
    failures = []

    async def ask(client):
        failures.append(await post(client, Ear()))

    async with open_client(2, server.open_stream) as client, trio.open_nursery() as nursery:
        nursery.start_soon(ask, client)
        nursery.start_soon(ask, client)
        await trio.sleep(0.7)
        client.hang_up()
        assert await post(client, Ear()) is None  # This request begins before the old connection has noticed its end.
    assert [failure.kind for failure in failures] == [FailureKind.DISCONNECT] * 2
    assert server.connection_count == 2
    assert [call.left for call in server.calls[:2]] == ["close"] * 2


@both
async def test_early_end_of_a_connection_is_a_disconnect(start_server, autojump_clock, http):
    async def drop(call):
        await call.start(200)
        await call.send(b"a beginning")
        await trio.sleep(1)
        await call.drop()

    server = start_server(drop, http=http)
    async with open_client(http, server.open_stream) as client:
        ear = Ear()
        failure = await post(client, ear)
    assert failure is not None
    assert failure.kind is FailureKind.DISCONNECT
    assert ear.data == b"a beginning"


@both
async def test_request_after_a_disconnect_gets_a_new_connection(start_server, autojump_clock, http):
    async def drop_the_first(call):
        if len(server.calls) == 1:
            await call.drop()
        else:
            await respond_twice_a_second(call)

    server = start_server(drop_the_first, http=http)
    async with open_client(http, server.open_stream) as client:
        failure = await post(client, Ear())
        assert failure is not None
        assert failure.kind is FailureKind.DISCONNECT
        assert await post(client, Ear()) is None
    assert server.connection_count == 2


@both
async def test_idle_connection_closed_by_the_server_does_not_fail_the_next_request(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    server.requests_per_connection = 2
    async with open_client(http, server.open_stream) as client:
        for _ in range(5):
            assert await post(client, Ear()) is None
    assert server.connection_count == 3
    assert len(server.calls) == 5


async def test_goaway_lets_earlier_streams_finish_and_later_ones_use_a_new_connection(start_server, autojump_clock):
    server = start_server(respond_twice_a_second, http=2)
    server.requests_per_connection = 2
    server.piece_bytes = 5  # GOAWAY and the frames after it arrive in small pieces.
    ears = [Ear() for _ in range(5)]
    failures = []

    async def ask(client, ear):
        failures.append(await post(client, ear))

    async with open_client(2, server.open_stream) as client, trio.open_nursery() as nursery:
        for ear in ears:
            nursery.start_soon(ask, client, ear)
            await trio.testing.wait_all_tasks_blocked()
    assert failures == [None] * 5
    assert [ear.data for ear in ears] == [b"first second"] * 5
    assert server.connection_count == 3


async def test_goaway_between_the_frames_of_a_response_loses_no_frame(autojump_clock):
    async def response_in_one_write(stream):
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.initiate_connection()
        await stream.send_all(connection.data_to_send())
        while not connection.highest_inbound_stream_id:
            connection.receive_data(await stream.receive_some())
        connection.send_headers(1, [(":status", "200")])
        connection.send_data(1, b"before ")
        goaway = b"\0\0\x0b\x07\0\0\0\0\0" + (1).to_bytes(4) + bytes(4) + b"bye"
        before = connection.data_to_send()
        connection.send_data(1, b"after", end_stream=True)
        await stream.send_all(before + goaway + connection.data_to_send())

    async with trio.open_nursery() as nursery:

        async def open_stream():
            client, server = trio.testing.memory_stream_pair()
            nursery.start_soon(response_in_one_write, server)
            return client

        async with open_client(2, open_stream) as client:
            ear = Ear()
            assert await post(client, ear, b"") is None
    assert ear.data == b"before after"


async def test_stream_beyond_goaway_is_retried_on_a_new_connection(start_server, autojump_clock):
    server = start_server(respond_twice_a_second, http=2)
    server.requests_per_connection = 2
    ears = [Ear() for _ in range(3)]
    async with open_client(2, server.open_stream) as client, trio.open_nursery() as nursery:
        for ear in ears:  # The client sends all three requests before the server announces that it accepts two.
            nursery.start_soon(post, client, ear)
    assert [ear.data for ear in ears] == [b"first second"] * 3
    assert server.connection_count == 2
    assert len(server.calls) == 3


async def test_reset_stream_is_reported_with_its_code(start_server, autojump_clock):
    server = start_server(lambda call: call.reset(h2.errors.ErrorCodes.REFUSED_STREAM), http=2)
    async with open_client(2, server.open_stream) as client:
        failure = await post(client, Ear())
    assert failure is not None
    assert failure.name == "reset REFUSED_STREAM"


async def test_requests_wait_for_a_free_stream(start_server, autojump_clock):
    server = start_server(respond_twice_a_second, http=2)
    server.streams_max = 2
    ears = [Ear() for _ in range(5)]
    async with open_client(2, server.open_stream) as client:
        async with trio.open_nursery() as nursery:
            for ear in ears:
                nursery.start_soon(post, client, ear)
        assert client.stream_wait_count == 3
    assert [ear.data for ear in ears] == [b"first second"] * 5
    assert server.in_flight_max == 2


async def test_waiting_request_gets_the_stream_of_a_request_that_left(start_server, autojump_clock):
    server = start_server(respond_for_ever, http=2)
    server.streams_max = 1
    async with open_client(2, server.open_stream) as client, trio.open_nursery() as nursery:
        nursery.start_soon(post, client, Ear())
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(post, client, Ear(leave_after=10))
        third = Ear(leave_after=10)
        nursery.start_soon(post, client, third)
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.calls) == 1
        await server.calls[0].reset(h2.errors.ErrorCodes.INTERNAL_ERROR)
        await third.first.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert [call.left for call in server.calls] == [None, "reset CANCEL", "reset CANCEL"]


@both
async def test_early_refusal_is_received_although_the_body_is_not_read(autojump_clock, http):
    """The server answers 413 after the head of a request, and grants no window for the body."""
    resets = []

    async def refuse(stream):
        if http == 1:
            await stream.receive_some(10)
            await stream.send_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
        else:
            connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
            connection.initiate_connection()
            await stream.send_all(connection.data_to_send())
            while not connection.highest_inbound_stream_id:
                connection.receive_data(await stream.receive_some())
            connection.send_headers(1, [(":status", "413")])
            connection.send_data(1, b"big", end_stream=True)
            await stream.send_all(connection.data_to_send())
            while data := await stream.receive_some():
                events = connection.receive_data(data)
                resets.extend(event for event in events if isinstance(event, h2.events.StreamReset))

    async with trio.open_nursery() as nursery:

        async def open_stream():
            client, server = trio.testing.memory_stream_pair()
            nursery.start_soon(refuse, server)
            return client

        async with open_client(http, open_stream) as client:
            ear = Ear()
            assert await post(client, ear, bytes(500_000)) is None
            assert (ear.status, ear.data) == (413, b"big")
            await trio.testing.wait_all_tasks_blocked()
            # Over HTTP/2, the client resets only this stream. Over HTTP/1.1, it closes the connection.
            assert len(resets) == http - 1


async def speak_to(http, greeting):
    """Return the result of a request to a server that sends only these bytes."""

    async def open_stream():
        client, server = trio.testing.memory_stream_pair()
        await server.send_all(greeting)
        return client

    async with open_client(http, open_stream) as client:
        return await post(client, Ear())


@both
@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x46\r\n\r\n" * 3])
async def test_server_with_another_protocol_is_recognized(autojump_clock, http, greeting):
    failure = await speak_to(http, greeting)
    assert failure is not None
    assert failure.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    "response, data, failure_kind, connections",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc", None, 1),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabc", b"abc", None, 2),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc", None, 2),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", b"abc", None, 1),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 200 OK\r\n\r\nabc", b"abc", None, 2),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", None, 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc", b"abc", FailureKind.DISCONNECT, 2),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", b"abc", FailureKind.DISCONNECT, 2),
    ],
)
async def test_http1_response_ends_by_length_chunks_or_connection_close(
    autojump_clock, response, data, failure_kind, connections
):
    opened = []

    async def open_stream():
        client, server = trio.testing.memory_stream_pair()
        opened.append(server)
        nursery.start_soon(serve, server)
        return client

    async def serve(server):
        async for asked in server:
            if asked.endswith(b"{}"):
                for byte in response:
                    await server.send_all(bytes([byte]))
                if connections == 2:
                    await server.send_eof()

    async with trio.open_nursery() as nursery, open_client(1, open_stream) as client:
        for _ in range(2):
            ear = Ear()
            failure = await post(client, ear, b"{}")
            assert (failure and failure.kind) is failure_kind
            assert ear.data == data
            assert ear.status == int(response.split(b"HTTP/1.1 ")[-1][:3])
        assert len(opened) == connections


async def test_connection_with_an_unfinished_request_is_not_reused(autojump_clock):
    ends = []

    async def open_stream():
        client, server = trio.testing.memory_stream_pair()
        ends.append(server)
        await server.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return client

    async with open_client(1, open_stream) as client:
        for _ in range(2):
            assert await client.request("POST", "/p", b"{} ", Ear(), withheld_bytes=1) is None
    assert len(ends) == 2


async def test_second_response_to_one_request_is_a_protocol_failure(autojump_clock):
    failure = await speak_to(1, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" * 2)
    assert failure is not None
    assert failure.kind is FailureKind.PROTOCOL
    assert "second response" in failure.message


async def test_http1_server_is_recognized_by_the_http2_client(autojump_clock):
    failure = await speak_to(2, b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
    assert failure is not None
    assert failure.kind is FailureKind.PROTOCOL


async def test_server_without_http2_settings_times_out(autojump_clock):
    failure = await speak_to(2, b"")
    assert failure is not None
    assert failure.kind is FailureKind.PROTOCOL
    assert "SETTINGS" in failure.message


@both
async def test_refused_connection_of_a_bench_client_is_a_failure_with_its_reason(autojump_clock, http):
    async def refuse():
        raise ConnectionRefusedError("nobody listens")

    async with open_client(http, refuse) as client:
        failure = await post(client, Ear())
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.CONNECT, "nobody listens")


@both
async def test_connection_that_does_not_open_times_out(autojump_clock, http):
    async with open_client(http, trio.sleep_forever) as client:
        failure = await post(client, Ear())
    assert failure is not None
    assert (failure.kind, failure.message) == (FailureKind.CONNECT, "no connection within 10 s")


@both
async def test_close_of_the_client_closes_its_connections(start_server, autojump_clock, http):
    server = start_server(respond_twice_a_second, http=http)
    async with open_client(http, server.open_stream) as client:
        assert await post(client, Ear()) is None
        assert server.open_count == 1
    await trio.testing.wait_all_tasks_blocked()
    assert server.open_count == 0


# --- Real sockets ---


@both
async def test_both_http_versions_work_over_plain_sockets(start_server, http):
    server = start_server(respond_at_once, http=http)
    async with listening(server) as port, open_client(http, opener("http", port, http)) as client:
        ear = Ear()
        assert await post(client, ear) is None
        assert ear.data == b"hello"


@pytest.fixture
def authority(monkeypatch, tmp_path):
    """A certificate authority that the client trusts, through the environment variable of OpenSSL."""
    made = trustme.CA()
    made.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


@pytest.mark.parametrize("http, offered", [(1, "http/1.1"), (2, "h2")])
async def test_tls_negotiates_the_http_version_by_alpn(start_server, authority, http, offered):
    server = start_server(respond_at_once, http=http)
    context = tls_context(authority, offered)
    async with listening(server, context) as port, open_client(http, opener("https", port, http)) as client:
        ear = Ear()
        assert await post(client, ear) is None
        assert ear.data == b"hello"


async def test_tls_without_http2_is_refused(start_server, authority):
    server = start_server(respond_at_once, http=1)
    context = tls_context(authority, "http/1.1")
    async with listening(server, context) as port, open_client(2, opener("https", port, 2)) as client:
        failure = await post(client, Ear())
    assert failure is not None
    assert failure.kind is FailureKind.CONNECT
    assert "did not agree to HTTP/2 (by ALPN)" in failure.message


async def test_bench_client_refuses_an_unknown_certificate(start_server):
    server = start_server(respond_at_once, http=1)
    context = tls_context(trustme.CA(), "http/1.1")
    async with listening(server, context) as port, open_client(1, opener("https", port, 1)) as client:
        failure = await post(client, Ear())
    assert failure is not None
    assert failure.kind is FailureKind.CONNECT
    assert "certificate verify failed" in failure.message


async def respond_at_once(call):
    await call.start(200)
    await call.send(b"hello")
    await call.finish()


def opener(scheme, port, http):
    return stream_opener(Target(scheme, "127.0.0.1", port, ""), http)


def tls_context(authority, protocol):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    context.set_alpn_protocols([protocol])
    return context


@contextlib.asynccontextmanager
async def socket_pair():
    """Return a stream and the socket at its other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
            yield stream, theirs


async def test_receive_reads_available_data_and_waits_for_the_rest(monkeypatch):
    reads: list[bytes] = []

    def read(fd, byte_count):
        if not reads:
            reads.append(b"")
            raise BlockingIOError  # Another task was faster, or the kernel's notice was wrong.
        reads.append(os_read(fd, byte_count))
        return reads[-1]

    os_read = os.read
    monkeypatch.setattr(os, "read", read)
    async with socket_pair() as (stream, theirs), trio.open_nursery() as nursery:
        theirs.send(b"here")
        assert await receive(stream) == b"here"
        got: list[bytes] = []

        async def wait():
            got.append(await receive(stream))

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not got
        assert reads == [b"", b"here"], "the kernel was asked before there was anything"
        theirs.send(b"later")
        await trio.testing.wait_all_tasks_blocked()
        assert got == [b"later"]
        theirs.close()
        assert await receive(stream) == b""


async def test_receive_from_a_broken_connection_raises_an_error():
    async with socket_pair() as (stream, theirs):
        await stream.send_all(b"never read")
        theirs.close()
        with pytest.raises(trio.BrokenResourceError):
            await receive(stream)


@contextlib.asynccontextmanager
async def listening(server, context=None):
    async def serve(stream):
        if context is not None:
            stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
            try:
                await stream.do_handshake()
            except trio.BrokenResourceError:
                return  # The client has refused the server's certificate.
        await server.serve(stream)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()
