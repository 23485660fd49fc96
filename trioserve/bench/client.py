"""Clients for HTTP/1.1 and HTTP/2, with their requests, listeners, failures and connections.

Over HTTP/2, many requests share a connection. A cancelled request resets its stream.

The task that reads the socket passes the body to the listener, with the time of the read. So no task switch and no
queue delays the measured time. Only the listener interprets the bytes.

httptools parses responses in a third of h11's time. A load generator on the server's machine takes its CPU time from
the server.
"""

from __future__ import annotations

import enum
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol

import h2.exceptions
import h11
import httptools
import msgspec
import trio

from trioserve.bench.settings import Target
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import ResponseEnd, ResponseResult
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = [
    "CONNECT_SECONDS_MAX",
    "RECEIVE_BYTES",
    "Client",
    "Failure",
    "FailureKind",
    "Http1Client",
    "Http2Client",
    "Listener",
    "OpenStream",
    "disconnected",
    "opened",
    "receive",
    "stream_opener",
]


CONNECT_SECONDS_MAX = 10.0  # A connection that takes longer counts as failed.
RECEIVE_BYTES = 65_536

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class FailureKind(enum.Enum):
    CONNECT = "connect"  # The client could not open a connection.
    DISCONNECT = "disconnect"  # The connection ended before the response was complete.
    UNPROCESSED = "unprocessed"  # The connection ended, and the server certainly did not process the request.
    RESET = "reset"  # The server reset the HTTP/2 stream.
    PROTOCOL = "protocol"  # The response is not HTTP, or has another HTTP version.
    TIMEOUT = "timeout"
    STATUS = "status"  # The response has a status other than 200.
    RESPONSE = "answer"  # The response has status 200, but is not the requested stream of tokens.


class Failure(msgspec.Struct, frozen=True):
    """The reason why a request failed.

    Attributes:
        kind: kind of the failure.
        message: error message for the user, in one sentence.
        code: HTTP status or HTTP/2 error, or "".
    """

    kind: FailureKind
    message: str
    code: str = ""

    @property
    def name(self) -> str:
        """Name under which failures of this kind are counted, such as "status 503"."""
        return f"{self.kind.value} {self.code}".rstrip()


class Listener(Protocol):
    """Receiver of a response. Both methods are called in the task that reads, and must neither wait nor raise."""

    def head(self, status: int) -> None:
        """Receive the final status.

        Args:
            status: HTTP status.
        """

    def body(self, data: bytes, now_seconds: float) -> bool:
        """Receive a piece of the body.

        Args:
            data: bytes that follow the previous piece of the body.
            now_seconds: time at which it was read, by Trio's clock.

        Returns:
            False to disconnect now, without the rest of the response.
        """


class Client(Protocol):
    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        """Send one request, and return when its response has ended or the listener has left.

        If this call is cancelled, the client resets the stream or closes the connection at once.

        Args:
            method: HTTP method.
            path: path and query.
            body: bytes after the head. Empty if the request has no body.
            listener: receiver of the response.
            withheld_bytes: number of bytes at the end of the body that the head announces but that are never sent. The
                client must disconnect instead.

        Returns:
            None, or the reason why there is no complete response. A response with an error status is not a failure.
        """

    async def aclose(self) -> None: ...


def stream_opener(target: Target, http: int) -> OpenStream:
    """Return a function that opens connections. The function raises OSError for all failures, including TLS errors.

    Args:
        target: the server.
        http: HTTP version, 1 or 2. With TLS, the client offers only this version.
    """
    context: ssl.SSLContext | None = None
    protocol = "h2" if http == 2 else "http/1.1"
    if target.scheme == "https":
        context = ssl.create_default_context()
        context.set_alpn_protocols([protocol])

    async def open_stream() -> trio.abc.Stream:
        stream = await connect_tcp(target.host, target.port)
        if context is None:
            return stream
        secured = trio.SSLStream(stream, context, server_hostname=target.host, https_compatible=True)
        agreed = False
        try:
            await secured.do_handshake()
            if http == 2 and secured.selected_alpn_protocol() != protocol:
                raise ConnectionError(f"{target.authority} did not agree to HTTP/2 (by ALPN)")
            agreed = True
        except trio.BrokenResourceError as error:
            raise ConnectionError(f"no TLS with {target.authority}: {error.__cause__ or error}") from error
        finally:
            if not agreed:
                await trio.aclose_forcefully(stream)
        return secured

    return open_stream


async def opened(open_stream: OpenStream) -> trio.abc.Stream | Failure:
    try:
        with trio.fail_after(CONNECT_SECONDS_MAX):
            return await open_stream()
    except trio.TooSlowError:
        return Failure(FailureKind.CONNECT, f"no connection within {CONNECT_SECONDS_MAX:g} s")
    except OSError as error:
        return Failure(FailureKind.CONNECT, f"{error}{_attempt_reasons(error.__cause__)}")


async def receive(stream: trio.abc.Stream) -> bytes:
    """Receive bytes as `receive_some` does, but wait until the socket is readable before the first read.

    A read without data would fail, and cost a fifth of a load generator's CPU time per token. A server on the same
    machine would lack this CPU time.

    Args:
        stream: the connection.
    """
    if not isinstance(stream, trio.SocketStream):
        return bytes(await stream.receive_some(RECEIVE_BYTES))
    while True:
        await trio.lowlevel.wait_readable(stream.socket)
        try:
            return os.read(stream.socket.fileno(), RECEIVE_BYTES)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(f"the connection is broken: {error}") from error


def _attempt_reasons(cause: BaseException | None) -> str:
    """Return the reasons why the attempts to connect failed.

    Trio tries every address of a name, and its own message has no reasons.
    """
    attempts = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
    reasons = {attempt.strerror or str(attempt) for attempt in attempts if isinstance(attempt, OSError)}
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


def disconnected(kind: FailureKind) -> Failure:
    return Failure(kind, "the server closed the connection before the response was complete")


class Http1Client:
    """An HTTP/1.1 client that keeps idle connections open for the next requests."""

    def __init__(self, open_stream: OpenStream, headers: list[tuple[str, str]]) -> None:
        """Make the client. It opens connections when it needs them.

        Args:
            open_stream: opens a connection.
            headers: headers of every request, with Host.
        """
        self._open_stream = open_stream
        self._headers = headers
        self._idle: list[_Http1Connection] = []
        self._heads: dict[tuple[str, str, int], bytes] = {}

    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        head = self._head(method, path, len(body))
        sent = body[: len(body) - withheld_bytes]
        while self._idle:
            connection = self._idle.pop()
            failure = await self._exchange(connection, head, sent, listener, is_whole=not withheld_bytes)
            # A server may close an idle connection at the moment of its next use. That is not a failure of the request.
            if failure is None or failure.kind is not FailureKind.UNPROCESSED:
                return failure
        stream = await opened(self._open_stream)
        if isinstance(stream, Failure):
            return stream
        return await self._exchange(_Http1Connection(stream), head, sent, listener, is_whole=not withheld_bytes)

    async def _exchange(
        self, connection: _Http1Connection, head: bytes, body: bytes, listener: Listener, *, is_whole: bool
    ) -> Failure | None:
        try:
            failure = await connection.exchange(head, body, listener, is_whole=is_whole)
        finally:
            if not connection.reusable:
                # The connection is closed before any wait, so that a cancellation cannot prevent the close.
                await trio.aclose_forcefully(connection.stream)
        if connection.reusable:
            self._idle.append(connection)
        return failure

    def _head(self, method: str, path: str, body_bytes: int) -> bytes:
        """Return the bytes of a request's head. The heads are cached, since a load has few different heads."""
        head = self._heads.get((method, path, body_bytes))
        if head is None:
            headers = [*self._headers, ("content-length", str(body_bytes))]
            head = h11.Connection(h11.CLIENT).send(h11.Request(method=method, target=path, headers=headers))
            assert head is not None
            self._heads[method, path, body_bytes] = head
        return head

    async def aclose(self) -> None:
        """Close the idle connections. A connection in use closes when its request is cancelled."""
        while self._idle:
            await trio.aclose_forcefully(self._idle.pop().stream)


class _Http1Connection:
    """One connection and its request. The parser calls its `on_` methods."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.reusable = False
        self._was_used = False
        self._parser = httptools.HttpResponseParser(self)

    def _begin_response(self, listener: Listener) -> None:
        self._listener = listener
        self._status = 0  # status of the final head, or 0 before the head
        self._is_framed = False  # True if the head defines where the body ends
        self._is_whole = False
        self._keeps_alive = False
        self._body: list[bytes] = []  # pieces of the body that the listener has not received yet

    # --- Callbacks of the parser ---

    def on_header(self, name: bytes, _value: bytes) -> None:
        self._is_framed = self._is_framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._is_whole:
            raise ValueError("a second response to one request")
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            self._listener.head(status)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._status:
            self._is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()

    # --- Exchange ---

    async def exchange(self, head: bytes, body: bytes, listener: Listener, *, is_whole: bool) -> Failure | None:
        """Send a request and read its response.

        Args:
            head: bytes of the head.
            body: the body, or its beginning.
            listener: receiver of the response.
            is_whole: False if the body is shorter than the head announces.
        """
        self.reusable = False
        silent_end = FailureKind.UNPROCESSED if self._was_used else FailureKind.DISCONNECT
        self._was_used = True
        self._begin_response(listener)
        try:
            await self.stream.send_all(head + body)
        except trio.BrokenResourceError:
            is_whole = False  # A server that refuses a request early may still have sent a response.
        received_any = False
        while True:
            try:
                data = await receive(self.stream)
            except trio.BrokenResourceError:
                return disconnected(FailureKind.DISCONNECT if received_any else silent_end)
            if not data:
                if self._status and not self._is_framed:
                    return None
                return disconnected(FailureKind.DISCONNECT if received_any else silent_end)
            now_seconds = trio.current_time()
            received_any = True
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                # If a callback of this class has raised an exception, it is the context of the error and the real
                # reason.
                reason = error.__context__ or error
                return Failure(FailureKind.PROTOCOL, f"the response is not HTTP/1.1: {reason}")
            if self._body:
                found = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                if not listener.body(found, now_seconds):
                    return None
            if self._is_whole:
                self.reusable = is_whole and self._keeps_alive
                return None


WINDOW_BYTES = 1 << 24  # window of each stream and connection, so large that the server never waits for credit
NO_ERROR = "NO_ERROR"  # error code of a server that shuts down gracefully


class Http2Client:
    """An HTTP/2 client with a fixed number of connections.

    A connection that ended is opened again when it is needed.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        open_stream: OpenStream,
        headers: list[tuple[str, str]],
        *,
        scheme: str,
        authority: str,
        connections: int,
    ) -> None:
        """Make the client. It opens connections when it needs them.

        Args:
            nursery: runs the tasks of the connections until it is cancelled.
            open_stream: opens a connection.
            headers: headers of every request.
            scheme: "http" or "https".
            authority: value of :authority.
            connections: number of connections.
        """
        self._nursery = nursery
        self._open_stream = open_stream
        self._headers = headers
        self._scheme = scheme
        self._authority = authority
        self._slots = [_ConnectionSlot() for _ in range(connections)]

    @property
    def stream_wait_count(self) -> int:
        """Number of requests that waited because the server allowed no more streams on a connection."""
        return sum(slot.stream_wait_count for slot in self._slots)

    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        slot = min(self._slots, key=lambda slot: slot.request_count)
        slot.request_count += 1
        try:
            failure = await self._request_once(slot, method, path, body, listener, withheld_bytes)
            if failure is not None and failure.kind is FailureKind.UNPROCESSED:
                failure = await self._request_once(slot, method, path, body, listener, withheld_bytes)
            return failure
        finally:
            slot.request_count -= 1

    async def _request_once(
        self, slot: _ConnectionSlot, method: str, path: str, body: bytes, listener: Listener, withheld_bytes: int
    ) -> Failure | None:
        async with slot.opening:
            connection = slot.connection
            if connection is None or not connection.accepts_requests:
                stream = await opened(self._open_stream)
                if isinstance(stream, Failure):
                    return stream
                connection = slot.connection = _Http2Connection(stream, scheme=self._scheme, authority=self._authority)
                self._nursery.start_soon(connection.run)
                failure = await connection.greeted()
                if failure is not None:
                    return failure
        if connection.is_full:
            slot.stream_wait_count += 1
        fields = [*self._headers, ("content-length", str(len(body)))]
        return await connection.request(method, path, fields, body, listener, withheld_bytes)

    async def aclose(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections, which ends the requests on them. A later request opens a new connection."""
        for slot in self._slots:
            if slot.connection is not None:
                slot.connection.close()
                slot.connection = None  # The connection takes a moment to end. Meanwhile, no new request may use it.


class _ConnectionSlot:
    """One of the client's connections, which may be closed."""

    def __init__(self) -> None:
        self.connection: _Http2Connection | None = None
        self.opening = trio.Lock()
        self.request_count = 0
        self.stream_wait_count = 0


class _Exchange:
    """One request. The object is the protocol's listener for the response."""

    __slots__ = ("connection", "ended", "failure", "is_over", "listener", "stream_id")

    def __init__(self, connection: _Http2Connection, listener: Listener) -> None:
        self.connection = connection
        self.listener = listener
        self.stream_id = 0
        self.ended = trio.Event()
        self.failure: Failure | None = None
        self.is_over = False

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.listener.head(status)

    def on_body(self, data: bytes) -> None:
        if not self.listener.body(data, self.connection.read_at):
            self.connection.leave(self)

    def on_end(self, end: ResponseEnd) -> None:
        if end.result is ResponseResult.COMPLETE:
            if not end.was_request_sent:  # The server has responded early, so it will not read the rest of the request.
                self.connection.protocol.reset(self.stream_id)
        elif end.result is ResponseResult.RESET:
            message = f"the server reset the stream: {end.error}"
            self.failure = Failure(FailureKind.RESET, message, end.error)
        elif end.result is ResponseResult.UNPROCESSED:
            self.failure = Failure(FailureKind.UNPROCESSED, f"not processed before GOAWAY: {end.error}")
        else:
            self.failure = self.connection.end
        self.finish()

    def finish(self) -> None:
        self.is_over = True
        self.ended.set()
        self.connection.stream_waiters.unpark()


class _Http2Connection:
    """One connection with two tasks: one reads and notifies the listeners, one writes all bytes that are queued.

    Requests only queue frames. So a request can be cancelled at any time without leaving half a frame in the
    connection.

    Attributes:
        read_at: time at which the bytes that are being processed were read, by Trio's clock.
        end: failure of all requests that still run when the connection ends.
    """

    def __init__(self, stream: trio.abc.Stream, *, scheme: str, authority: str) -> None:
        self.protocol = Http2ClientProtocol(
            authority=authority, scheme=scheme, window_bytes=WINDOW_BYTES, connection_window_bytes=WINDOW_BYTES
        )
        self.read_at = 0.0
        self.end = disconnected(FailureKind.DISCONNECT)
        self.stream_waiters = trio.lowlevel.ParkingLot()
        self._stream = stream
        self._writer = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._settled = trio.Event()  # set after the server's first SETTINGS, or after the end of the connection
        self._ended = False

    @property
    def accepts_requests(self) -> bool:
        return self.protocol.is_settled and self.protocol.goaway is None and not self._ended

    @property
    def is_full(self) -> bool:
        """True if the server allows no further stream for now."""
        return self.protocol.stream_count >= self.protocol.streams_max

    def close(self) -> None:
        self._scope.cancel()

    async def greeted(self) -> Failure | None:
        """Wait for the server's SETTINGS, which contain the maximum number of streams.

        If the SETTINGS do not arrive in time, close the connection.
        """
        with trio.move_on_after(CONNECT_SECONDS_MAX):
            await self._settled.wait()
        if self.accepts_requests:
            return None
        self.close()
        return self.end if self._ended else Failure(FailureKind.PROTOCOL, "the server sent no HTTP/2 SETTINGS")

    async def run(self) -> None:
        """Run until the connection has ended and all requests on it have failed or ended."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    self.end = await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._settled.set()
            self.protocol.receive(b"")
            self.stream_waiters.unpark_all()
            await trio.aclose_forcefully(self._stream)

    async def request(
        self,
        method: str,
        path: str,
        fields: list[tuple[str, str]],
        body: bytes,
        listener: Listener,
        withheld_bytes: int,
    ) -> Failure | None:
        while self.is_full and self.accepts_requests:
            await self.stream_waiters.park()
        if not self.accepts_requests:
            return Failure(FailureKind.UNPROCESSED, "the connection ended before the request was sent")
        exchange = _Exchange(self, listener)
        exchange.stream_id = self.protocol.begin(method, path, fields, exchange, has_body=bool(body))
        if body:
            self.protocol.send_body(exchange.stream_id, body[: len(body) - withheld_bytes], is_last=not withheld_bytes)
        self._writer.unpark()
        try:
            await exchange.ended.wait()
        finally:
            if not exchange.is_over:
                self.leave(exchange)
        return exchange.failure

    def leave(self, exchange: _Exchange) -> None:
        """Reset a stream. Neither the rest of the response nor the rest of the request is sent any more.

        Args:
            exchange: the request.
        """
        self.protocol.reset(exchange.stream_id)
        self._writer.unpark()
        exchange.finish()
        self._close_if_drained()

    async def _read(self) -> Failure:
        protocol = self.protocol
        while True:
            try:
                data = await receive(self._stream)
            except trio.BrokenResourceError:
                return self.end
            self.read_at = trio.current_time()
            if not data:
                return self.end
            streams_max = protocol.streams_max
            try:
                protocol.receive(data)
            except h2.exceptions.ProtocolError as error:
                return Failure(FailureKind.PROTOCOL, f"the server does not follow HTTP/2: {error}")
            if protocol.is_settled and not self._settled.is_set():
                self._settled.set()
            if protocol.streams_max != streams_max:
                self.stream_waiters.unpark_all()
            if protocol.goaway is not None:
                self._drain(protocol.goaway.error)
            self._writer.unpark()

    async def _write(self) -> None:
        while True:
            data = self.protocol.pop_unsent()
            if data:
                try:
                    await self._stream.send_all(data)
                except trio.BrokenResourceError:
                    return  # The reading task ends the connection after it has read the server's last bytes.
            else:
                await self._writer.park()

    def _drain(self, error: str) -> None:
        """Handle GOAWAY. Streams that the server has accepted continue. New requests need another connection."""
        if error != NO_ERROR:
            self.end = Failure(FailureKind.DISCONNECT, f"the server ended the connection: {error}", error)
        self.stream_waiters.unpark_all()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self.protocol.goaway is not None and not self.protocol.stream_count:
            self.close()
