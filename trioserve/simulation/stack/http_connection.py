"""The connection of a simulated client. It can send and read in pieces, stop reading for a while, and end.

It reads HTTP strictly: bytes that a server must not send raise AssertionError.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import h2.exceptions
import h11
import trio

from trioserve.simulation.stack.http_plan import Connection
from trioserve.testing.memory_client import MemoryEnd
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import Fields, Http1ClientProtocol, ResponseEnd, ResponseResult

__all__ = ["Caller", "Response", "StrictClient", "WatchedEnd"]

AUTHORITY = "simulated"


class Response:
    """The received part of one response. The object is the listener of the HTTP protocol.

    Attributes:
        number: number of the request.
        status: HTTP status, or None before the head has arrived.
        headers: response headers.
        body: received bytes.
        is_complete: True after the whole body has arrived.
        lost: reason why the rest of the response will not come. None: the rest may still come.
    """

    def __init__(self) -> None:
        self.number = 0
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_complete = False
        self.lost: str | None = None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.lost is not None

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in fields}

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self, end: ResponseEnd) -> None:
        if end.result is ResponseResult.COMPLETE:
            self.is_complete = True
        elif end.result is ResponseResult.DISCONNECTED:
            self.lost = "the connection ended"
        else:
            self.lost = f"{end.result.value}: {end.error}"


class StrictClient:
    """The client's side of a connection.

    Args:
        http: HTTP version. A connection of version 1 carries one request after another. Version 2 has a stream per
            request.
        window: over HTTP/2, number of bytes of a response that the server may send before it gets credit.
    """

    def __init__(self, *, http: int, window: int = 65_535) -> None:
        self._protocol: Http1ClientProtocol | Http2ClientProtocol
        if http == 1:
            self._protocol = Http1ClientProtocol(authority=AUTHORITY)
        else:
            self._protocol = Http2ClientProtocol(authority=AUTHORITY, window_bytes=window)

    def begin(self, response: Response, method: str, path: str, fields: Fields, *, has_body: bool) -> None:
        response.number = self._protocol.begin(method, path, fields, response, has_body=has_body)

    def send_body(self, response: Response, data: bytes, *, is_last: bool) -> None:
        self._protocol.send_body(response.number, data, is_last=is_last)

    def reset(self, response: Response) -> None:
        assert self._protocol.reset(response.number), "HTTP/1.1 has no reset of one request"

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Args:
            data: the bytes. Empty: the server has ended the connection, or the connection broke.
        """
        try:
            self._protocol.receive(data)
        except h11.RemoteProtocolError as error:
            raise AssertionError(f"the server broke HTTP/1.1: {error}") from error
        except h2.exceptions.ProtocolError as error:
            raise AssertionError(f"the server broke HTTP/2: {error}") from error
        if isinstance(self._protocol, Http1ClientProtocol):
            assert not self._protocol.informational_count, "the server sent 1xx to a client that did not request it"

    def withhold_credit(self, response: Response) -> bool:
        """Grant no further credit for a response.

        Args:
            response: the response.

        Returns:
            False if the protocol has no credit for responses.
        """
        return self._protocol.withhold_credit(response.number)

    def give_a_byte(self, response: Response) -> None:
        """Grant credit for one more byte. Call this method only for HTTP/2.

        Args:
            response: the response.
        """
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.give_a_byte(response.number)

    def give_credit(self, response: Response) -> None:
        self._protocol.give_credit(response.number)

    def say_goaway(self) -> None:
        """Send GOAWAY. Call this method only for HTTP/2."""
        assert isinstance(self._protocol, Http2ClientProtocol)
        self._protocol.say_goaway()

    def unsent(self) -> bytes:
        return self._protocol.take_unsent()


READ_BYTES = 65536


class WatchedEnd(trio.abc.HalfCloseableStream):
    """The server's end of a connection, which reports all sent bytes.

    Args:
        end: the server's real end of the connection.
        on_sent: called in order with all bytes and events that the server sends.
    """

    def __init__(self, end: MemoryEnd, on_sent: Callable[[str, bytes], None]) -> None:
        self._end = end
        self._on_sent = on_sent
        self._is_sending = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_sending, "the server sends from two tasks at the same time"
        self._on_sent("sends", bytes(data))
        self._is_sending = True
        try:
            await self._end.send_all(data)
        finally:
            self._is_sending = False

    async def wait_send_all_might_not_block(self) -> None:
        await self._end.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        self._on_sent("ends", b"")
        await self._end.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._end.receive_some(max_bytes)

    async def aclose(self) -> None:
        self._on_sent("closes", b"")
        await self._end.aclose()


class Caller:
    """The client of one connection. Its method `read` runs as a task.

    Args:
        end: the client's end of the connection.
        connection: settings of the connection.
        ask_count: number of requests on this connection.

    Attributes:
        changed: wakes tasks that wait for a response.
        asks_left: number of requests that have not begun.
        is_over: True if the server will send nothing more.
        reads_again_at: time until which the client does not read.
    """

    def __init__(self, end: MemoryEnd, connection: Connection, *, ask_count: int) -> None:
        self.end = end
        self.connection = connection
        self.protocol = StrictClient(http=connection.http, window=connection.window)
        self.changed = trio.lowlevel.ParkingLot()
        self.asks_left = ask_count
        self.is_over = False
        self.reads_again_at = 0.0
        self._sending = trio.Lock()
        self._sizes: Iterator[int] = itertools.cycle(connection.pieces or (READ_BYTES,))

    async def read(self) -> None:
        """Read until the end of the connection."""
        while not self.is_over:
            await trio.sleep_until(self.reads_again_at)
            try:
                received = await self.end.receive_some(next(self._sizes))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                received = b""
            self.protocol.receive(received)
            self.is_over = not received
            self.changed.unpark_all()
            if not self.is_over:
                await self.flush()

    def stop_reading(self, seconds: float) -> None:
        self.reads_again_at = max(self.reads_again_at, trio.current_time() + seconds)

    async def begin(self, response: Response, method: str, path: str, fields: Fields, body: bytes) -> None:
        """Send the head of a request and the first part of its body.

        Args:
            response: receives the response.
            method: HTTP method.
            path: path of the request.
            fields: header fields.
            body: first part of the body.
        """
        self.protocol.begin(response, method, path, fields, has_body=bool(fields) and method == "POST")
        await self.send_body(response, body, is_last=False)

    async def send_body(self, response: Response, data: bytes, *, is_last: bool) -> None:
        if data and not response.is_over:
            self.protocol.send_body(response, data, is_last=is_last)
        await self.flush()

    async def flush(self) -> None:
        async with self._sending:
            data = self.protocol.unsent()
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data:
                    size = next(self._sizes)
                    piece, data = data[:size], data[size:]
                    await self.end.send_all(piece)

    async def say_goaway(self) -> None:
        self.protocol.say_goaway()
        await self.flush()

    async def end_sending(self) -> None:
        async with self._sending:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.end.send_eof()
