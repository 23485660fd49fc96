"""A websocket client of a server in memory, over HTTP/1.1. It can leave in every way in which real clients do."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from trioserve.contracts.errors import TrioserveError
from trioserve.testing.memory_stream import MemoryEnd

if TYPE_CHECKING:
    from wsproto.connection import Connection

__all__ = ["MemoryWebSocket", "WebSocketClosed", "WebSocketRefused"]

KEY = base64.b64encode(b"a key of a test.")
READ_BYTES = 65_536


class WebSocketRefused(TrioserveError):
    """The server answered the opening handshake with an ordinary response.

    Args:
        status: HTTP status.
        headers: header fields of the response, with names in lower case.
        body: body of the response.
    """

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"the server refused the websocket with {status}: {body[:500]!r}")
        self.status = status
        self.headers = headers
        self.body = body


class WebSocketClosed(TrioserveError):
    """The websocket has ended, so no further message will arrive.

    Args:
        code: close code of the server's close frame. None: the connection ended without a close frame.
        reason: text of the close frame.
    """

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(f"the server closed the websocket with {code} {reason!r}")
        self.code = code
        self.reason = reason


class MemoryWebSocket:
    """A websocket client with its own connection. `ServedInMemory.websocket` creates it.

    The client has no task of its own: it reads, and answers pings, only while `receive` runs.

    Args:
        stream: the client's end of the connection. A test may also send its own bytes through it.

    Attributes:
        headers: header fields of the response that accepted the websocket, with names in lower case.
        pings: payloads of the server's pings.
        answers_pings: False: the client sends no pongs.
    """

    def __init__(self, stream: MemoryEnd) -> None:
        from wsproto.connection import Connection, ConnectionType

        self.stream = stream
        self.headers: dict[str, str] = {}
        self.pings: list[bytes] = []
        self.answers_pings = True
        self._protocol: Connection = Connection(ConnectionType.CLIENT)
        self._messages: list[str | bytes] = []
        self._pieces: list[str | bytes] = []
        self._closed: WebSocketClosed | None = None

    async def open(self, path: str, headers: Mapping[str, str] | None = None) -> None:
        """Send the opening handshake, and wait for the response.

        Args:
            path: path and query.
            headers: additional header fields. None as a value removes a field of the handshake.

        Raises:
            WebSocketRefused: the server refused the websocket.
        """
        fields = {
            "Host": "memory",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": KEY.decode("ascii"),
            **(headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await self.stream.send_all(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
        received = b""
        while b"\r\n\r\n" not in received:
            piece = await self._read()
            if not piece:
                raise WebSocketClosed(None, "the connection ended before the response")
            received += piece
        head, _, rest = received.partition(b"\r\n\r\n")
        status_line, *field_lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in field_lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(status_line.split(" ")[1])
        if status != 101:
            length = int(self.headers.get("content-length", "0"))
            while len(rest) < length:
                rest += await self._read()
            raise WebSocketRefused(status, self.headers, rest)
        self._take(rest)

    async def send(self, message: str | bytes) -> None:
        """Send one message.

        Args:
            message: str is sent as text, bytes as binary.
        """
        from wsproto.events import BytesMessage, TextMessage

        event = TextMessage(data=message) if isinstance(message, str) else BytesMessage(data=message)
        await self.stream.send_all(self._protocol.send(event))

    async def receive(self) -> str | bytes:
        """Wait for the next message.

        Raises:
            WebSocketClosed: the server has closed the websocket, or the connection has ended.
        """
        await trio.lowlevel.checkpoint()
        while not self._messages:
            if self._closed is not None:
                raise self._closed
            received = await self._read()
            if received:
                await self._answer(self._take(received))
            else:
                self._closed = WebSocketClosed(None, "the connection ended")
        return self._messages.pop(0)

    async def close(self, code: int = 1000, reason: str = "") -> WebSocketClosed:
        """Send a close frame, and wait for the close frame of the server. Messages that arrive before it are dropped.

        Args:
            code: the close code.
            reason: the text for the server.

        Returns:
            Code and reason of the server's close frame.
        """
        from wsproto.events import CloseConnection

        await self.stream.send_all(self._protocol.send(CloseConnection(code=code, reason=reason)))
        return await self.closed()

    async def closed(self) -> WebSocketClosed:
        """Wait until the websocket has ended. Messages that arrive before that are dropped."""
        while True:
            try:
                await self.receive()
            except WebSocketClosed as closed:
                return closed

    def leave(self) -> None:
        """Close the connection without a close frame, as when the client's process ends."""
        self.stream.close()

    def abort(self) -> None:
        """Reset the connection."""
        self.stream.abort()

    async def half_close(self) -> None:
        await self.stream.send_eof()

    # --- helpers ---

    async def _read(self) -> bytes:
        try:
            return await self.stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def _answer(self, replies: bytes) -> None:
        if replies:
            try:
                await self.stream.send_all(replies)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    def _take(self, received: bytes) -> bytes:
        """Read frames, and return the bytes that answer them."""
        from wsproto.connection import ConnectionState
        from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

        replies = b""
        if not received or self._closed is not None:
            return replies
        self._protocol.receive_data(received)
        for event in self._protocol.events():
            if isinstance(event, (TextMessage, BytesMessage)):
                self._pieces.append(event.data if isinstance(event.data, str) else bytes(event.data))
                if event.message_finished:
                    empty = "" if isinstance(event, TextMessage) else b""
                    self._messages.append(empty.join(self._pieces))  # type: ignore[arg-type]
                    self._pieces = []
            elif isinstance(event, Ping):
                self.pings.append(bytes(event.payload))
                if self.answers_pings and self._protocol.state is ConnectionState.OPEN:
                    replies += self._protocol.send(event.response())
            elif isinstance(event, CloseConnection):
                self._closed = WebSocketClosed(int(event.code), event.reason or "")
                if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    replies += self._protocol.send(event.response())
        return replies
