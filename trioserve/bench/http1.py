"""An HTTP/1.1 client. Each request in flight has one connection. Leaving a request closes its connection.

httptools parses responses in a third of h11's time. A load generator on the server's machine takes its CPU time from
the server.
"""

from __future__ import annotations

import h11
import httptools
import trio

from trioserve.bench.client import Failure, FailureKind, Listener, OpenStream, disconnected, opened, receive

__all__ = ["Http1Client"]


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
                # Closing comes before any wait, so that cancellation cannot prevent it.
                await trio.aclose_forcefully(connection.stream)
        if connection.reusable:
            self._idle.append(connection)
        return failure

    def _head(self, method: str, path: str, body_bytes: int) -> bytes:
        """Return the bytes of a head. They are cached, since a load has few different heads."""
        head = self._heads.get((method, path, body_bytes))
        if head is None:
            headers = [*self._headers, ("content-length", str(body_bytes))]
            head = h11.Connection(h11.CLIENT).send(h11.Request(method=method, target=path, headers=headers))
            assert head is not None
            self._heads[method, path, body_bytes] = head
        return head

    async def aclose(self) -> None:
        """Close the idle connections. Connections in use close when their requests are left."""
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
        self._status = 0  # status of the final head, or 0
        self._is_framed = False  # True if the head says where the body ends
        self._is_whole = False
        self._keeps_alive = False
        self._body: list[bytes] = []  # pieces that the parser has found and the listener has not received

    # --- called by the parser ---

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

    # --- the exchange ---

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
                # The context is an exception of a method of this class, which is then the reason.
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
