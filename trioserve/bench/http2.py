"""Requests over HTTP/2, many on a connection; leaving one resets its stream."""

from __future__ import annotations

import contextlib

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
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

__all__ = ["FrameSplitter", "Http2Client"]

WINDOW_BYTES = 1 << 24  # per stream and connection: the client must never be what a server waits for
FRAME_HEADER_BYTES = 9
FRAME_BYTES_MAX = 16_384  # the HTTP/2 default, which this client does not raise
GOAWAY = 0x07


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
        self._headers = [(":scheme", scheme), (":authority", authority), *headers]
        self._places = [_Place() for _ in range(connections)]

    @property
    def stream_wait_count(self) -> int:
        """Requests that had to wait because the server allows no more streams on a connection."""
        return sum(place.stream_wait_count for place in self._places)

    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        headers = [(":method", method), (":path", path), *self._headers, ("content-length", str(len(body)))]
        place = min(self._places, key=lambda place: place.request_count)
        place.request_count += 1
        try:
            failure = await self._request_once(place, headers, body, listener, withheld_bytes)
            if failure is not None and failure.kind is FailureKind.UNPROCESSED:
                failure = await self._request_once(place, headers, body, listener, withheld_bytes)
            return failure
        finally:
            place.request_count -= 1

    async def _request_once(
        self, place: _Place, headers: list[tuple[str, str]], body: bytes, listener: Listener, withheld_bytes: int
    ) -> Failure | None:
        async with place.opening:
            connection = place.connection
            if connection is None or not connection.takes_requests:
                stream = await opened(self._open_stream)
                if isinstance(stream, Failure):
                    return stream
                connection = place.connection = _Http2Connection(stream)
                self._nursery.start_soon(connection.run)
                failure = await connection.greeted()
                if failure is not None:
                    return failure
        if connection.is_full:
            place.stream_wait_count += 1
        return await connection.request(headers, body, listener, withheld_bytes)

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
    """One request on its stream. unsent: what the server's flow control windows have not yet let go. is_whole: False if
    the stream stays open behind it, since the body was announced longer."""

    __slots__ = ("ended", "failure", "is_whole", "listener", "unsent")

    def __init__(self, listener: Listener, body: bytes, withheld_bytes: int) -> None:
        self.listener = listener
        self.unsent = memoryview(body)[: len(body) - withheld_bytes]
        self.is_whole = not withheld_bytes
        self.ended = trio.Event()
        self.failure: Failure | None = None


class _Http2Connection:
    """One connection: a reader that tells the listeners, a writer that sends whatever has gathered since it last wrote.

    Requests only queue frames, so a request can be cancelled anywhere without leaving half a frame on the wire.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        codes = h2.settings.SettingCodes
        values = {codes.ENABLE_PUSH: 0, codes.INITIAL_WINDOW_SIZE: WINDOW_BYTES}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=values)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES)
        self._frames = FrameSplitter()
        self._exchanges: dict[int, _Exchange] = {}
        self._writer = trio.lowlevel.ParkingLot()
        self._stream_waiters = trio.lowlevel.ParkingLot()
        self._scope = trio.CancelScope()
        self._settled = trio.Event()  # the server's first SETTINGS came, or the connection ended without
        self._draining = False
        self._end = disconnected(FailureKind.DISCONNECT)
        self._ended = False

    @property
    def takes_requests(self) -> bool:
        return self._settled.is_set() and not self._draining and not self._ended

    @property
    def is_full(self) -> bool:
        """The server allows no further stream for now."""
        return len(self._exchanges) >= self._h2.remote_settings.max_concurrent_streams

    def close(self) -> None:
        self._scope.cancel()

    async def greeted(self) -> Failure | None:
        """Wait for the server's SETTINGS, which say how many streams it allows. Closes the connection otherwise."""
        with trio.move_on_after(CONNECT_SECONDS_MAX):
            await self._settled.wait()
        if self.takes_requests:
            return None
        self.close()
        return self._end if self._ended else Failure(FailureKind.PROTOCOL, "the server sent no HTTP/2 SETTINGS")

    async def run(self) -> None:
        """Returns when the connection is over; whatever ran on it has failed then."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    self._end = await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self._ended = True
            self._settled.set()
            for stream_id in list(self._exchanges):
                self._finish(stream_id, self._end)
            self._stream_waiters.unpark_all()
            await trio.aclose_forcefully(self._stream)

    async def request(
        self, headers: list[tuple[str, str]], body: bytes, listener: Listener, withheld_bytes: int
    ) -> Failure | None:
        while self.is_full and self.takes_requests:
            await self._stream_waiters.park()
        if not self.takes_requests:
            return Failure(FailureKind.UNPROCESSED, "the connection ended before the request was sent")
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, headers, end_stream=not body)
        exchange = self._exchanges[stream_id] = _Exchange(listener, body, withheld_bytes)
        self._send_body(stream_id, exchange)
        self._writer.unpark()
        try:
            await exchange.ended.wait()
        finally:
            if stream_id in self._exchanges:
                self._leave(stream_id)
        return exchange.failure

    async def _read(self) -> Failure:
        while True:
            try:
                data = await receive(self._stream)
            except trio.BrokenResourceError:
                return self._end
            now_seconds = trio.current_time()
            if not data:
                return self._end
            try:
                for event in self._h2.receive_data(self._frames.feed(data)):
                    self._handle(event, now_seconds)
            except h2.exceptions.ProtocolError as error:
                return Failure(FailureKind.PROTOCOL, f"the server does not speak proper HTTP/2: {error}")
            if self._frames.goaway is not None:
                self._drain(*self._frames.goaway)
            self._writer.unpark()

    async def _write(self) -> None:
        while True:
            data = self._h2.data_to_send()
            if data:
                try:
                    await self._stream.send_all(data)
                except trio.BrokenResourceError:
                    return  # the reader sees the end, after whatever the server still had to say
            else:
                await self._writer.park()

    def _handle(self, event: h2.events.Event, now_seconds: float) -> None:
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            exchange = self._exchanges.get(event.stream_id)
            if exchange is not None and event.data and not exchange.listener.body(event.data, now_seconds):
                self._leave(event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            exchange = self._exchanges.get(event.stream_id)
            if exchange is not None and (
                exchange.unsent or not exchange.is_whole
            ):  # answered early: nobody will read the rest of the request
                self._leave(event.stream_id)
            self._finish(event.stream_id, None)
        elif isinstance(event, h2.events.ResponseReceived):
            exchange = self._exchanges.get(event.stream_id)
            if exchange is not None:
                exchange.listener.head(int(dict(event.headers or ())[b":status"]))
        elif isinstance(event, h2.events.StreamReset):
            code = _error_name(event.error_code)
            self._finish(event.stream_id, Failure(FailureKind.RESET, f"the server reset the stream: {code}", code))
        elif isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
            self._settled.set()
            for stream_id, exchange in self._exchanges.items():
                self._send_body(stream_id, exchange)
            self._stream_waiters.unpark_all()

    def _send_body(self, stream_id: int, exchange: _Exchange) -> None:
        while exchange.unsent:
            window = self._h2.local_flow_control_window(stream_id)
            size = min(window, self._h2.max_outbound_frame_size, len(exchange.unsent))
            if size <= 0:
                return
            piece, exchange.unsent = exchange.unsent[:size], exchange.unsent[size:]
            self._h2.send_data(stream_id, bytes(piece), end_stream=exchange.is_whole and not exchange.unsent)

    def _drain(self, last_stream_id: int, code: int) -> None:
        """GOAWAY: streams up to the last one go on, later ones were not looked at, new ones need another connection."""
        self._draining = True
        name = _error_name(code)
        if code:
            message = f"the server ended the connection: {name}"
            self._end = Failure(FailureKind.DISCONNECT, message, name)
        for stream_id in [stream_id for stream_id in self._exchanges if stream_id > last_stream_id]:
            self._finish(stream_id, Failure(FailureKind.UNPROCESSED, f"not processed before GOAWAY: {name}"))
        self._stream_waiters.unpark_all()
        if not self._exchanges:
            self.close()

    def _leave(self, stream_id: int) -> None:
        """Reset the stream: neither the rest of the answer nor that of the request goes over the wire any more."""
        with contextlib.suppress(h2.exceptions.StreamClosedError):  # closed already by a frame of the same read
            self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        self._writer.unpark()
        self._finish(stream_id, None)

    def _finish(self, stream_id: int, failure: Failure | None) -> None:
        """The exchange is over, unless it was already."""
        exchange = self._exchanges.pop(stream_id, None)
        if exchange is None:
            return
        exchange.failure = failure
        exchange.ended.set()
        self._stream_waiters.unpark()
        if self._draining and not self._exchanges:
            self.close()


class FrameSplitter:
    """Whole frames from pieces cut anywhere, GOAWAY taken out: h2 refuses every frame that follows one, although a
    server that leaves gracefully first finishes the streams it has (RFC 9113, section 6.8)."""

    def __init__(self) -> None:
        self._rest = b""
        self.goaway: tuple[int, int] | None = None  # last stream id and error code of the latest one

    def feed(self, piece: bytes) -> bytes:
        """The frames that this piece completes. A frame that is too long is passed on as it is, for h2 to refuse."""
        buffer = self._rest + piece
        kept: list[bytes] = []
        position, kept_to = 0, 0
        while len(buffer) - position >= FRAME_HEADER_BYTES:
            length = int.from_bytes(buffer[position : position + 3])
            end = position + FRAME_HEADER_BYTES + length
            if length > FRAME_BYTES_MAX:
                position = len(buffer)
            elif end > len(buffer):
                break
            elif buffer[position + 3] == GOAWAY and length >= 8:
                kept.append(buffer[kept_to:position])
                payload = buffer[position + FRAME_HEADER_BYTES : end]
                self.goaway = int.from_bytes(payload[:4]) & 0x7FFF_FFFF, int.from_bytes(payload[4:8])
                position = kept_to = end
            else:
                position = end
        self._rest = buffer[position:]
        kept.append(buffer[kept_to:position])
        return b"".join(kept)


def _error_name(code: int | None) -> str:
    try:
        return h2.errors.ErrorCodes(code or 0).name
    except ValueError:
        return f"error {code}"
