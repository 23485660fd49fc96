"""Requests over HTTP/2, many on a connection; leaving one resets its stream."""

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

WINDOW_BYTES = 1 << 24  # per stream and connection: the client must never be what a server waits for
NO_ERROR = "NO_ERROR"  # of a server that leaves gracefully


class Http2Client:
    """A fixed number of connections that share the requests; one that ended is opened anew when it is needed."""

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
        """The connections' tasks run in the nursery until it is cancelled."""
        self._nursery = nursery
        self._open_stream = open_stream
        self._headers = headers
        self._scheme = scheme
        self._authority = authority
        self._places = [_Place() for _ in range(connections)]

    @property
    def stream_wait_count(self) -> int:
        """Requests that had to wait because the server allows no more streams on a connection."""
        return sum(place.stream_wait_count for place in self._places)

    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        place = min(self._places, key=lambda place: place.request_count)
        place.request_count += 1
        try:
            failure = await self._request_once(place, method, path, body, listener, withheld_bytes)
            if failure is not None and failure.kind is FailureKind.UNPROCESSED:
                failure = await self._request_once(place, method, path, body, listener, withheld_bytes)
            return failure
        finally:
            place.request_count -= 1

    async def _request_once(
        self, place: _Place, method: str, path: str, body: bytes, listener: Listener, withheld_bytes: int
    ) -> Failure | None:
        async with place.opening:
            connection = place.connection
            if connection is None or not connection.takes_requests:
                stream = await opened(self._open_stream)
                if isinstance(stream, Failure):
                    return stream
                connection = place.connection = _Http2Connection(stream, scheme=self._scheme, authority=self._authority)
                self._nursery.start_soon(connection.run)
                failure = await connection.greeted()
                if failure is not None:
                    return failure
        if connection.is_full:
            place.stream_wait_count += 1
        fields = [*self._headers, ("content-length", str(len(body)))]
        return await connection.request(method, path, fields, body, listener, withheld_bytes)

    async def aclose(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections, and with them whatever still runs on them. A later request opens new ones."""
        for place in self._places:
            if place.connection is not None:
                place.connection.close()
                place.connection = None  # it takes a moment to end, in which nobody must begin on it


class _Place:
    """Where one of the client's connections lives, whether it is open or not."""

    def __init__(self) -> None:
        self.connection: _Http2Connection | None = None
        self.opening = trio.Lock()
        self.request_count = 0
        self.stream_wait_count = 0


class _Exchange:
    """One request, and the protocol's listener for it."""

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
            if not end.was_request_sent:  # answered early: nobody will read the rest of the request
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
    """One connection: a reader that tells the listeners, a writer that sends whatever has gathered since it last wrote.

    Requests only queue frames, so a request can be cancelled anywhere without leaving half a frame on the wire.
    read_at: when what is told just now was read, on trio's clock. end: how what still runs fails when it is over.
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
        self._settled = trio.Event()  # the server's first SETTINGS came, or the connection ended without
        self._ended = False

    @property
    def takes_requests(self) -> bool:
        return self.protocol.is_settled and self.protocol.goaway is None and not self._ended

    @property
    def is_full(self) -> bool:
        """The server allows no further stream for now."""
        return self.protocol.stream_count >= self.protocol.streams_max

    def close(self) -> None:
        self._scope.cancel()

    async def greeted(self) -> Failure | None:
        """Wait for the server's SETTINGS, which say how many streams it allows. Closes the connection otherwise."""
        with trio.move_on_after(CONNECT_SECONDS_MAX):
            await self._settled.wait()
        if self.takes_requests:
            return None
        self.close()
        return self.end if self._ended else Failure(FailureKind.PROTOCOL, "the server sent no HTTP/2 SETTINGS")

    async def run(self) -> None:
        """Returns when the connection is over; whatever ran on it has failed then."""
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
        while self.is_full and self.takes_requests:
            await self.stream_waiters.park()
        if not self.takes_requests:
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
        """Reset the stream: neither the rest of the response nor that of the request goes over the wire any more."""
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
                return Failure(FailureKind.PROTOCOL, f"the server does not speak proper HTTP/2: {error}")
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
                    return  # the reader sees the end, after whatever the server still had to say
            else:
                await self._writer.park()

    def _drain(self, error: str) -> None:
        """GOAWAY: streams up to the last one go on, new ones need another connection."""
        if error != NO_ERROR:
            self.end = Failure(FailureKind.DISCONNECT, f"the server ended the connection: {error}", error)
        self.stream_waiters.unpark_all()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self.protocol.goaway is not None and not self.protocol.stream_count:
            self.close()
