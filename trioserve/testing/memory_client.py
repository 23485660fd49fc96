"""A client of a server in memory, over HTTP/1.1 or HTTP/2. It can disconnect in every way in which real clients do.

`memory_connection` makes a connection whose two ends behave like sockets: the buffer is bounded, and each end may
vanish. The client has no task of its own. A caller that waits for a response reads from the connection. So the client
reads nothing while no caller waits.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import h2.exceptions
import h11
import msgspec
import trio

from trioserve.contracts.errors import TrioserveError
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import Http1ClientProtocol, ResponseEnd, ResponseResult

__all__ = ["ConnectionLost", "MemoryClient", "MemoryEnd", "MemoryResponse", "memory_connection"]


# Maximum number of unread bytes in one direction. Sockets have larger buffers. So tests see back pressure early.
BUFFER_BYTES = 65_536
RECEIVE_BYTES = 65_536


def memory_connection(*, buffer_bytes: int = BUFFER_BYTES) -> tuple[MemoryEnd, MemoryEnd]:
    """Return the client's end and the server's end of a new connection.

    Args:
        buffer_bytes: maximum number of unread bytes. A sender waits while there are more.
    """
    there, back = _Pipe(buffer_bytes), _Pipe(buffer_bytes)
    return MemoryEnd(outgoing=there, incoming=back), MemoryEnd(outgoing=back, incoming=there)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, buffer_bytes: int) -> None:
        self.data = bytearray()
        self.buffer_bytes = buffer_bytes
        self.ended = False  # True if the sender will send no more data
        self.is_silent = False  # True if new data is lost, and neither end notices this
        self.broken = False  # True if the receiver reads no more data, or unread data is lost
        self.changed = trio.lowlevel.ParkingLot()

    def put(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_silent:
            return
        self.data += data
        self.changed.unpark_all()

    def end(self) -> None:
        if self.is_silent:
            return
        self.ended = True
        self.changed.unpark_all()

    def break_(self) -> None:
        if self.is_silent:
            return
        self.broken = True
        self.data.clear()
        self.changed.unpark_all()


class MemoryEnd(trio.abc.HalfCloseableStream):
    """One end of a connection. At most one task may send, and one task may receive. `close` and `abort` do not wait."""

    def __init__(self, *, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._is_closed = False
        self._is_sending = False
        self._is_receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._one_sender():
            self.send_nowait(data)
            await self._room()

    def send_nowait(self, data: bytes | bytearray | memoryview) -> None:
        """Send without waiting, even if the buffer is full.

        Args:
            data: bytes to send.

        Raises:
            trio.ClosedResourceError: this end was closed, or send_eof was called.
            trio.BrokenResourceError: the other end is gone.
        """
        self._check_open()
        if self._outgoing.ended:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")
        if self._outgoing.broken:
            raise trio.BrokenResourceError("the other end is gone")
        self._outgoing.put(data)

    def try_send(self, data: bytes) -> int:
        """Send the bytes for which the buffer has space, and return their number.

        Args:
            data: bytes to send.
        """
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending through this end")
        room = max(0, self._outgoing.buffer_bytes - len(self._outgoing.data))
        self.send_nowait(data[:room])
        return min(room, len(data))

    async def wait_send_all_might_not_block(self) -> None:
        with self._one_sender():
            await self._room()

    async def _room(self) -> None:
        await trio.lowlevel.checkpoint()
        outgoing = self._outgoing
        while len(outgoing.data) > outgoing.buffer_bytes and not (outgoing.broken or self._is_closed):
            await outgoing.changed.park()
        self._check_open()
        if outgoing.broken:
            raise trio.BrokenResourceError("the other end is gone")

    async def send_eof(self) -> None:
        with self._one_sender():
            await trio.lowlevel.checkpoint()
            self._check_open()
            self._outgoing.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, allowed is 1 or more")
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving from this end")
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            incoming = self._incoming
            while not (incoming.data or incoming.ended or incoming.broken or self._is_closed):
                await incoming.changed.park()
        finally:
            self._is_receiving = False
        self._check_open()
        if incoming.broken:
            raise trio.BrokenResourceError("the other end is gone")
        received = bytes(incoming.data[: max_bytes or RECEIVE_BYTES])
        del incoming.data[: len(received)]
        incoming.changed.unpark_all()
        return received

    def close(self) -> None:
        """Close this end, as a socket is closed. The other end can still read the unread bytes, but cannot send."""
        self._is_closed = True
        self._outgoing.end()
        self._incoming.break_()
        for pipe in (self._outgoing, self._incoming):
            pipe.changed.unpark_all()  # This wakes the tasks of this end, even if the connection is silent.

    def abort(self) -> None:
        """Reset the connection. Unread bytes are lost, and the other end gets an error at once."""
        self._is_closed = True
        self._outgoing.break_()
        self._incoming.break_()

    def go_silent(self) -> None:
        """Lose all later data in both directions, as on a connection that a NAT has forgotten.

        Neither end notices the loss.
        """
        self._incoming.is_silent = self._outgoing.is_silent = True

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    @contextmanager
    def _one_sender(self) -> Iterator[None]:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending through this end")
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this end was closed")


AUTHORITY = "memory"
LOST = {
    ResponseResult.RESET: "the server reset the stream with {error}",
    ResponseResult.UNPROCESSED: "the server went away ({error}) and has not looked at the request",
    ResponseResult.DISCONNECTED: "the server closed the connection",
}
DONE = b"[DONE]"  # This event ends a stream of OpenAI's API.


class ConnectionLost(TrioserveError):
    """The server closed the connection or reset the stream before the response was complete."""


class MemoryResponse:
    """A response, of which perhaps only a part has arrived.

    An iteration yields the decoded events of a stream, without [DONE]. Each read raises ConnectionLost if the
    connection ends before the response is complete.

    Args:
        read_more: reads from the connection once.

    Attributes:
        status: HTTP status. None until the head has arrived (see `head`).
        headers: response headers, with names in lower case.
        body: the bytes of the body that have arrived.
        is_complete: True after the whole body has arrived.
        lost: why the rest of the response will not arrive. None if it may still arrive.
    """

    def __init__(self, read_more: Callable[[], Awaitable[None]]) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.lost: str | None = None
        self._read_more = read_more
        self._read_bytes = 0  # bytes of the body that were returned as events or pieces

    async def head(self) -> int:
        """Wait for the head and return the status."""
        await self._until(lambda: self.status is not None)
        assert self.status is not None
        return self.status

    async def read(self) -> bytes:
        """Wait for the whole body and return it."""
        await self._until(lambda: self.is_complete)
        return self.body

    async def json(self) -> Any:
        """Wait for the whole body, and decode it as JSON."""
        return msgspec.json.decode(await self.read())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield pieces of the body as they arrive."""
        while True:
            await self._until(lambda: self.is_complete or len(self.body) > self._read_bytes)
            piece = self.body[self._read_bytes :]
            if not piece:
                return
            self._read_bytes += len(piece)
            yield piece

    def __aiter__(self) -> MemoryResponse:
        return self

    async def __anext__(self) -> Any:
        while True:
            await self._until(lambda: self.is_complete or b"\n\n" in self.body[self._read_bytes :])
            block, end, _rest = self.body[self._read_bytes :].partition(b"\n\n")
            if not end:
                raise StopAsyncIteration
            self._read_bytes += len(block) + len(end)
            value = b"\n".join(
                line.removeprefix(b"data: ") for line in block.split(b"\n") if line.startswith(b"data: ")
            )
            if value not in (b"", DONE):  # A comment has no data. It only keeps the connection open.
                return msgspec.json.decode(value)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not condition():
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            await self._read_more()


class _Listener:
    """Copies the head and the body of a response from the protocol into a MemoryResponse."""

    def __init__(self, response: MemoryResponse) -> None:
        self._response = response

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self._response.status = status
        self._response.headers = {name.decode(): value.decode() for name, value in fields}

    def on_body(self, data: bytes) -> None:
        self._response.body += data

    def on_end(self, end: ResponseEnd) -> None:
        if end.result is ResponseResult.COMPLETE:
            self._response.is_complete = True
        else:
            self._response.lost = LOST[end.result].format(error=end.error)


class MemoryClient:
    """A client with one connection.

    Args:
        stream: the client's end of the connection. A test may also send its own bytes through it.
        http: 1 for HTTP/1.1 with one request at a time, 2 for HTTP/2 with as many requests as the server allows.
        headers: headers of every request.
    """

    def __init__(self, stream: MemoryEnd, *, http: int, headers: dict[str, str] | None = None) -> None:
        assert http in (1, 2), f"http is {http}, allowed are 1 and 2"
        self.stream = stream
        self._headers = list((headers or {}).items())
        self._protocol: Http1ClientProtocol | Http2ClientProtocol
        if http == 1:
            self._protocol = Http1ClientProtocol(authority=AUTHORITY)
        else:
            self._protocol = Http2ClientProtocol(authority=AUTHORITY)
        self._responses: dict[int, MemoryResponse] = {}
        self._sending = trio.Lock()
        self._is_reading = False
        self._has_read = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        withheld_bytes: int = 0,
    ) -> AsyncIterator[MemoryResponse]:
        """Send a request, and yield its response before any part of the response has arrived.

        If the context ends before the response is complete, the client gives up the response: over HTTP/2, it resets
        the stream, and over HTTP/1.1, it closes the connection.

        Args:
            path: path and query.
            body: bytes, or a value that is sent as JSON. None for no body.
            method: HTTP method. The default is POST with a body, and GET without a body.
            headers: additional headers.
            withheld_bytes: number of bytes at the end of the body that are announced but never sent.
        """
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = [*self._headers, *(headers or {}).items()]
        if data:
            fields.append(("content-length", str(len(data))))
            if not any(name.lower() == "content-type" for name, _value in fields):
                fields.append(("content-type", "application/json"))
        assert not isinstance(self._protocol, Http1ClientProtocol) or not self._protocol.waiting_count, (
            "HTTP/1.1 allows one request at a time: use http=2, or another client"
        )
        response = MemoryResponse(self._receive)
        method = method or ("POST" if data else "GET")
        number = self._protocol.begin(method, path, fields, _Listener(response), has_body=bool(data))
        self._responses[number] = response
        try:
            await self._send_body(number, data[: len(data) - withheld_bytes], is_whole=withheld_bytes == 0)
            yield response
        finally:
            del self._responses[number]
            if not response.is_complete and response.lost is None:
                self._leave(number)

    async def post(self, path: str, body: object, *, headers: dict[str, str] | None = None) -> MemoryResponse:
        """Send a request with a body, and return the whole response.

        Args:
            path: path and query.
            body: bytes, or a value that is sent as JSON.
            headers: additional headers.
        """
        async with self.ask(path, body, headers=headers) as response:
            await response.read()
        return response

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> MemoryResponse:
        async with self.ask(path, headers=headers) as response:
            await response.read()
        return response

    def close(self) -> None:
        """Close both directions of the connection at once, as when the client's process ends."""
        self.stream.close()
        self._lose("this client has closed the connection")

    def abort(self) -> None:
        """Reset the connection. The server loses all bytes that it has not read yet."""
        self.stream.abort()
        self._lose("this client has reset the connection")

    async def half_close(self) -> None:
        """Announce that no more bytes will be sent. The client still reads."""
        await self.stream.send_eof()

    # --- helpers ---

    async def _send_body(self, number: int, data: bytes, *, is_whole: bool) -> None:
        if data:
            self._protocol.send_body(number, data, is_last=is_whole)
        await self._flush()
        while self._protocol.unsent_bytes(number) and self._responses[number].lost is None:
            await self._receive()  # The received bytes may contain a window update for the rest of the body.

    async def _flush(self) -> None:
        # If the server has closed the connection, the client can still read responses that were sent earlier.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with self._sending:
                unsent = self._protocol.pop_unsent()
                if unsent:
                    await self.stream.send_all(unsent)

    def _leave(self, number: int) -> None:
        if self._protocol.reset(number):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                self.stream.send_nowait(self._protocol.pop_unsent())  # The reset must not wait.
        else:
            self.close()

    async def _receive(self) -> None:
        """Read from the connection once, or wait until another caller has read from it. That caller may have received
        bytes of this response.
        """
        if self._is_reading:
            await self._has_read.park()
            return
        self._is_reading = True
        try:
            data = await self.stream.receive_some()
            self._protocol.receive(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose("the server closed the connection")
        except (h11.RemoteProtocolError, h2.exceptions.ProtocolError) as error:
            self._lose(f"the server broke the protocol: {error}")
        finally:
            self._is_reading = False
            self._has_read.unpark_all()
        await self._flush()

    def _lose(self, why: str) -> None:
        for response in self._responses.values():
            if not response.is_complete and response.lost is None:
                response.lost = why
