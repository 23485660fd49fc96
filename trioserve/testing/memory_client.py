"""A client joined to a server in memory, over HTTP/1.1 or HTTP/2, that can leave in every way there is.

It has no task of its own: whoever waits for a response reads the connection. So a client that does not read is simply
one whose answers nobody waits for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import h2.exceptions
import h11
import msgspec
import trio

from trioserve.contracts.errors import TrioserveError
from trioserve.testing.memory_stream import MemoryEnd
from trioserve.trio_tools.http1_client import Http1ClientProtocol
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import ResponseEnd, ResponseResult

__all__ = ["ConnectionLost", "MemoryResponse", "MemoryClient"]

AUTHORITY = "memory"
LOST = {
    ResponseResult.RESET: "the server reset the stream with {error}",
    ResponseResult.UNPROCESSED: "the server went away ({error}) and has not looked at the request",
    ResponseResult.DISCONNECTED: "the server closed the connection",
}
DONE = b"[DONE]"  # ends a stream of events in OpenAI's API


class ConnectionLost(TrioserveError):
    """The server closed the connection, or reset the stream, before the response was complete."""


class MemoryResponse:
    """What has come of one response. status and headers are there after `await head()`.

    body: the bytes so far. is_complete: that was all. Iterating gives the events of a stream, decoded, without the last
    one, [DONE]; every read raises ConnectionLost if the response breaks off.
    """

    def __init__(self, read_more: Callable[[], Awaitable[None]]) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.lost: str | None = None  # why there will be no more
        self._read_more = read_more
        self._told_bytes = 0  # of the body, given out as events or pieces

    async def head(self) -> int:
        """Wait for the status, and return it."""
        await self._until(lambda: self.status is not None)
        assert self.status is not None
        return self.status

    async def read(self) -> bytes:
        """The whole body."""
        await self._until(lambda: self.is_complete)
        return self.body

    async def json(self) -> Any:
        """The whole body, decoded."""
        return msgspec.json.decode(await self.read())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it comes."""
        while True:
            await self._until(lambda: self.is_complete or len(self.body) > self._told_bytes)
            piece = self.body[self._told_bytes :]
            if not piece:
                return
            self._told_bytes += len(piece)
            yield piece

    def __aiter__(self) -> MemoryResponse:
        return self

    async def __anext__(self) -> Any:
        while True:
            await self._until(lambda: self.is_complete or b"\n\n" in self.body[self._told_bytes :])
            block, end, _rest = self.body[self._told_bytes :].partition(b"\n\n")
            if not end:
                raise StopAsyncIteration
            self._told_bytes += len(block) + len(end)
            value = b"\n".join(
                line.removeprefix(b"data: ") for line in block.split(b"\n") if line.startswith(b"data: ")
            )
            if value not in (b"", DONE):  # a comment keeps the connection open and says nothing
                return msgspec.json.decode(value)

    async def _until(self, condition: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not condition():
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            await self._read_more()


class _Listener:
    """Writes down what the protocol tells of one response."""

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
    """One connection. HTTP/1.1 (http=1) has one request at a time on it, HTTP/2 (http=2) as many as the server takes.

    stream: the client's end, for a test that wants to send bytes of its own. headers: sent with every request.
    """

    def __init__(self, stream: MemoryEnd, *, http: int, headers: dict[str, str] | None = None) -> None:
        assert http in (1, 2), f"http is {http}, it may be 1 or 2"
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
        """Send a request and get its response, of which nothing need have come yet. Leaving before it is complete
        leaves as clients do: over HTTP/2 by a reset of the stream, over HTTP/1.1 by closing the connection.

        body: bytes, or a value that becomes JSON. method: POST with a body, GET without. withheld_bytes: so many bytes
        at the end of the body are announced and never sent.
        """
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = [*self._headers, *(headers or {}).items()]
        if data:
            fields.append(("content-length", str(len(data))))
            if not any(name.lower() == "content-type" for name, _value in fields):
                fields.append(("content-type", "application/json"))
        assert not isinstance(self._protocol, Http1ClientProtocol) or not self._protocol.waiting_count, (
            "one request at a time over HTTP/1.1: take http=2, or another client"
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
        """The whole response to a request."""
        async with self.ask(path, body, headers=headers) as response:
            await response.read()
        return response

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> MemoryResponse:
        async with self.ask(path, headers=headers) as response:
            await response.read()
        return response

    def close(self) -> None:
        """Close the connection, as a client does that is gone: both directions, at once, whatever is under way."""
        self.stream.close()
        self._lose("this client has closed the connection")

    def abort(self) -> None:
        """The same by a reset of the connection: the server loses what is on its way to it."""
        self.stream.abort()
        self._lose("this client has reset the connection")

    async def half_close(self) -> None:
        """Say that nothing more will be sent. Reading goes on."""
        await self.stream.send_eof()

    # --- inside ---

    async def _send_body(self, number: int, data: bytes, *, is_whole: bool) -> None:
        if data:
            self._protocol.send_body(number, data, is_last=is_whole)
        await self._flush()
        while self._protocol.unsent_bytes(number) and self._responses[number].lost is None:
            await self._receive()  # there may be room for more then

    async def _flush(self) -> None:
        # If the other end is gone, what it answered before can still be read.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with self._sending:
                unsent = self._protocol.take_unsent()
                if unsent:
                    await self.stream.send_all(unsent)

    def _leave(self, number: int) -> None:
        if self._protocol.reset(number):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                self.stream.send_nowait(self._protocol.take_unsent())  # leaving waits for nothing
        else:
            self.close()

    async def _receive(self) -> None:
        """Take in what comes next; or wait until another reader has done so, who may have read what this one wants."""
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
