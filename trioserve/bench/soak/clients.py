"""The clients of a soak: one for each HTTP version, and one for each way of leaving."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioserve.bench.client import RECEIVE_BYTES, Client, OpenStream
from trioserve.bench.http1 import Http1Client
from trioserve.bench.http2 import Http2Client
from trioserve.bench.run import common_headers
from trioserve.bench.soak.plan import SoakRequest, Way
from trioserve.bench.soak.settings import SoakSettings

__all__ = ["SoakClients"]

HTTP2_CONNECTIONS = 4  # A server limits the resets on each connection.
HALF_CLOSE_SECONDS_MAX = 10.0  # trioserve closes at once. The rest is for a busy machine.


class SoakClients:
    """The clients of a soak.

    Attributes:
        unanswered_half_closes: connections that the server did not close after the client's half-close.
        hang_up_count: number of times that the hanging-up client closed its connection.
    """

    def __init__(self, nursery: trio.Nursery, settings: SoakSettings, opener: Callable[[int], OpenStream]) -> None:
        """Make the clients. They open connections when they are used.

        Args:
            nursery: runs the tasks of HTTP/2 connections.
            settings: settings of the soak.
            opener: returns, for an HTTP version, a function that opens a connection with that version.
        """
        target = settings.target
        headers = common_headers(settings.api_key)
        self.unanswered_half_closes = 0
        self.hang_up_count = 0
        open_http1, open_http2 = opener(1), opener(2)

        async def open_half_closing() -> trio.abc.Stream:
            stream = await open_http1()
            if isinstance(stream, trio.abc.HalfCloseableStream):
                return _HalfClosing(stream, self._note_unanswered)
            return stream  # TLS has no half-close, so these clients close.

        def http1(open_stream: OpenStream) -> Http1Client:
            return Http1Client(open_stream, [("host", target.authority), *headers])

        def http2(connections: int) -> Http2Client:
            return Http2Client(
                nursery, open_http2, headers, scheme=target.scheme, authority=target.authority, connections=connections
            )

        self.observer = http1(open_http1)
        """Reads the server's metrics through its own connection."""
        self._http1 = http1(open_http1)
        self._half_closing = http1(open_half_closing)
        self._http2 = http2(HTTP2_CONNECTIONS)
        self._hanging_up = http2(1)

    def client_for(self, request: SoakRequest) -> Client:
        way = None if request.leave is None else request.leave.way
        if way is Way.HALF_CLOSE:
            return self._half_closing
        if way is Way.HANG_UP:
            return self._hanging_up
        return self._http1 if request.http == 1 else self._http2

    def hang_up(self) -> None:
        """Close the connection of the clients that hang up, with all requests on it."""
        self.hang_up_count += 1
        self._hanging_up.hang_up()

    async def close_all_but_observer(self) -> None:
        clients: tuple[Client, ...] = (self._http1, self._half_closing, self._http2, self._hanging_up)
        for client in clients:
            await client.aclose()

    def _note_unanswered(self) -> None:
        self.unanswered_half_closes += 1


class _HalfClosing(trio.abc.Stream):
    """A connection that its client leaves with a half-close. The client then waits for the server to close."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, on_unanswered: Callable[[], None]) -> None:
        self._stream = stream
        self._on_unanswered = on_unanswered

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        try:
            # Shielded, since a client leaves by being cancelled, and this code then closes its connection.
            with trio.move_on_after(HALF_CLOSE_SECONDS_MAX, shield=True) as patience:
                await self._stream.send_eof()
                while await self._stream.receive_some(RECEIVE_BYTES):
                    pass
            if patience.cancelled_caught:
                self._on_unanswered()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The server closed first.
        finally:
            await trio.aclose_forcefully(self._stream)
