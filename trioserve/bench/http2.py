"""An HTTP/2 client. Many requests share a connection. A cancelled request resets its stream."""

from __future__ import annotations

import h2.exceptions
import trio

from trioserve.bench.client import (
    CONNECT_SECONDS_MAX,
    Failure,
    FailureKind,
    Listener,
    OpenStream,
    disconnected,
    opened,
    receive,
)
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import ResponseEnd, ResponseResult

__all__ = ["Http2Client"]

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
            data = self.protocol.take_unsent()
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
