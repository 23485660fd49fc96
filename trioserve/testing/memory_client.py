"""A client joined to a server in memory, over HTTP/1.1 or HTTP/2, that can leave in every way there is.

It has no task of its own: whoever waits for an answer reads the connection. So a client that does not read is simply
one whose answers nobody waits for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h11
import msgspec
import trio

from trioserve.bench.http2 import FrameSplitter
from trioserve.contracts.errors import TrioserveError
from trioserve.testing.memory_stream import MemoryEnd

__all__ = ["ConnectionLost", "MemoryAnswer", "MemoryClient"]

AUTHORITY = "memory"
DONE = b"[DONE]"  # ends a stream of events in OpenAI's API


class ConnectionLost(TrioserveError):
    """The server closed the connection, or reset the stream, before the answer was complete."""


class MemoryAnswer:
    """What has come of one answer. status and headers are there after `await head()`.

    body: the bytes so far. is_complete: that was all. Iterating gives the events of a stream, decoded, without the last
    one, [DONE]; every read raises ConnectionLost if the answer breaks off.
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

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            await self._until(lambda: self.is_complete or len(self.body) > self._told_bytes)
            piece = self.body[self._told_bytes :]
            if not piece:
                return
            self._told_bytes += len(piece)
            yield piece

    def __aiter__(self) -> MemoryAnswer:
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


class _Protocol(Protocol):
    """What a connection does with one version of HTTP: bytes in, bytes out."""

    def begin(self, method: str, path: str, headers: list[tuple[str, str]], *, has_body: bool) -> int:
        """Make the head of a request; returns its number."""

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> int:
        """Make as much of the body as may be sent now; returns how many bytes. is_last: with `data` it ends."""

    def leave(self, number: int) -> bool:
        """Make whatever tells the server that nobody wants the answer. False: only closing the connection does."""

    def receive(self, data: bytes, answers: dict[int, MemoryAnswer]) -> None:
        """Add what has come to the answers; data: empty at the end of the connection."""

    def take_unsent(self) -> bytes: ...


class MemoryClient:
    """One connection. HTTP/1.1 (http=1) has one request at a time on it, HTTP/2 (http=2) as many as the server takes.

    stream: the client's end, for a test that wants to send bytes of its own. headers: sent with every request.
    """

    def __init__(self, stream: MemoryEnd, *, http: int, headers: dict[str, str] | None = None) -> None:
        assert http in (1, 2), f"http is {http}, it may be 1 or 2"
        self.stream = stream
        self._headers = list((headers or {}).items())
        self._protocol: _Protocol = _Http1() if http == 1 else _Http2()
        self._answers: dict[int, MemoryAnswer] = {}
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
    ) -> AsyncIterator[MemoryAnswer]:
        """Send a request and get its answer, of which nothing need have come yet. Leaving before it is complete leaves
        as clients do: over HTTP/2 by a reset of the stream, over HTTP/1.1 by closing the connection.

        body: bytes, or a value that becomes JSON. method: POST with a body, GET without. withheld_bytes: so many bytes
        at the end of the body are announced and never sent.
        """
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        fields = [*self._headers, *(headers or {}).items()]
        if data:
            fields.append(("content-length", str(len(data))))
            if not any(name.lower() == "content-type" for name, _value in fields):
                fields.append(("content-type", "application/json"))
        number = self._protocol.begin(method or ("POST" if data else "GET"), path, fields, has_body=bool(data))
        answer = self._answers[number] = MemoryAnswer(self._receive)
        try:
            await self._send_body(number, data[: len(data) - withheld_bytes], is_whole=withheld_bytes == 0)
            yield answer
        finally:
            del self._answers[number]
            if not answer.is_complete and answer.lost is None:
                self._leave(number)

    async def post(self, path: str, body: object, *, headers: dict[str, str] | None = None) -> MemoryAnswer:
        """The whole answer to a request."""
        async with self.ask(path, body, headers=headers) as answer:
            await answer.read()
        return answer

    async def get(self, path: str, *, headers: dict[str, str] | None = None) -> MemoryAnswer:
        async with self.ask(path, headers=headers) as answer:
            await answer.read()
        return answer

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
        answer = self._answers[number]
        sent_bytes = 0
        while True:
            sent_bytes += self._protocol.send_body(number, data[sent_bytes:], is_last=is_whole)
            await self._flush()
            if sent_bytes == len(data) or answer.is_complete or answer.lost is not None:
                return
            await self._receive()  # there may be room for more then

    async def _flush(self) -> None:
        # If the other end is gone, what it answered before can still be read.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with self._sending:
                unsent = self._protocol.take_unsent()
                if unsent:
                    await self.stream.send_all(unsent)

    def _leave(self, number: int) -> None:
        if self._protocol.leave(number):
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
            self._protocol.receive(data, self._answers)
            if not data:
                self._lose("the server closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose("the server closed the connection")
        except (h11.RemoteProtocolError, h2.exceptions.ProtocolError) as error:
            self._lose(f"the server broke the protocol: {error}")
        finally:
            self._is_reading = False
            self._has_read.unpark_all()
        await self._flush()

    def _lose(self, why: str) -> None:
        for answer in self._answers.values():
            if not answer.is_complete and answer.lost is None:
                answer.lost = why


class _Http1:
    """One request at a time; leaving one means closing the connection."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._number = 0
        self._unsent = b""

    def begin(self, method: str, path: str, headers: list[tuple[str, str]], *, has_body: bool) -> int:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        assert self._http.our_state is h11.IDLE, "one request at a time over HTTP/1.1: take http=2, or another client"
        self._send(h11.Request(method=method, target=path, headers=[("host", AUTHORITY), *headers]))
        self._number += 1
        return self._number

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> int:
        if data:
            self._send(h11.Data(data=data))
        if is_last:
            self._send(h11.EndOfMessage())
        return len(data)

    def leave(self, number: int) -> bool:
        return False

    def receive(self, data: bytes, answers: dict[int, MemoryAnswer]) -> None:
        self._http.receive_data(data)
        while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            answer = answers.get(self._number)
            if answer is None or isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                answer.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                answer.is_complete = True

    def take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def _send(self, event: h11.Event) -> None:
        self._unsent += self._http.send(event) or b""


class _Http2:
    """As many requests at a time as the server takes. Gives credit for what it reads."""

    def __init__(self) -> None:
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._http.initiate_connection()
        self._frames = FrameSplitter()

    def begin(self, method: str, path: str, headers: list[tuple[str, str]], *, has_body: bool) -> int:
        number = self._http.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":authority", AUTHORITY), (":path", path)]
        self._http.send_headers(number, [*pseudo, *headers], end_stream=not has_body)
        return number

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> int:
        sent_bytes = 0
        while sent_bytes < len(data):
            room = min(self._http.local_flow_control_window(number), self._http.max_outbound_frame_size)
            if room <= 0:
                return sent_bytes
            piece = data[sent_bytes : sent_bytes + room]
            sent_bytes += len(piece)
            self._http.send_data(number, piece, end_stream=is_last and sent_bytes == len(data))
        return sent_bytes

    def leave(self, number: int) -> bool:
        with suppress(h2.exceptions.ProtocolError):  # the stream is over, or the connection
            self._http.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
        return True

    def receive(self, data: bytes, answers: dict[int, MemoryAnswer]) -> None:
        for event in self._http.receive_data(self._frames.feed(data)):
            answer = answers.get(getattr(event, "stream_id", None) or 0)
            if isinstance(event, h2.events.DataReceived):
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if answer is None:
                continue
            if isinstance(event, h2.events.ResponseReceived):
                answer.headers = {str(name): str(value) for name, value in event.headers}
                answer.status = int(answer.headers.pop(":status"))
            elif isinstance(event, h2.events.DataReceived):
                answer.body += event.data
            elif isinstance(event, h2.events.StreamEnded):
                answer.is_complete = True
            elif isinstance(event, h2.events.StreamReset):
                answer.lost = f"the server reset the stream with error {event.error_code}"

    def take_unsent(self) -> bytes:
        return self._http.data_to_send()
