"""Requests over HTTP/1.1, a connection each at a time; leaving one closes it.

Answers are parsed by httptools, in a third of h11's time: a load generator on the server's own machine takes what it
uses from what it measures.
"""

from __future__ import annotations

import h11
import httptools
import trio

from trioserve.bench.client import Failure, FailureKind, Listener, OpenStream, disconnected, opened, receive

__all__ = ["Http1Client"]


class Http1Client:
    """One connection for each request in flight, kept alive between requests."""

    def __init__(self, open_stream: OpenStream, headers: list[tuple[str, str]]) -> None:
        """headers: sent with every request, Host included."""
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
            # A server may close an idle connection just when it is used again; that is no fault of the request.
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
                await trio.aclose_forcefully(connection.stream)  # closes before anything waits, cancelled or not
        if connection.reusable:
            self._idle.append(connection)
        return failure

    def _head(self, method: str, path: str, body_bytes: int) -> bytes:
        """Of a request; a load has few that differ."""
        head = self._heads.get((method, path, body_bytes))
        if head is None:
            headers = [*self._headers, ("content-length", str(body_bytes))]
            head = h11.Connection(h11.CLIENT).send(h11.Request(method=method, target=path, headers=headers))
            assert head is not None
            self._heads[method, path, body_bytes] = head
        return head

    async def aclose(self) -> None:
        """Close the idle connections; those in use are closed by leaving their requests."""
        while self._idle:
            await trio.aclose_forcefully(self._idle.pop().stream)


class _Http1Connection:
    """One connection and the request on it. Where the parser is told of a response, it calls back here."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.reusable = False
        self._was_used = False
        self._parser = httptools.HttpResponseParser(self)

    def _begin_response(self, listener: Listener) -> None:
        self._listener = listener
        self._status = 0  # of the final head, once it has come
        self._is_framed = False  # it says where its body ends, other than by the end of the connection
        self._is_whole = False
        self._keeps_alive = False
        self._body: list[bytes] = []  # what the parser has found since it was last looked at

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
        """is_whole: False if the body is only the beginning of what the head announces."""
        self.reusable = False
        silent_end = FailureKind.UNPROCESSED if self._was_used else FailureKind.DISCONNECT
        self._was_used = True
        self._begin_response(listener)
        try:
            await self.stream.send_all(head + body)
        except trio.BrokenResourceError:
            is_whole = False  # a server that refuses early may have answered all the same
        heard = False
        while True:
            try:
                data = await receive(self.stream)
            except trio.BrokenResourceError:
                return disconnected(FailureKind.DISCONNECT if heard else silent_end)
            if not data:
                if self._status and not self._is_framed:
                    return None
                return disconnected(FailureKind.DISCONNECT if heard else silent_end)
            now_seconds = trio.current_time()
            heard = True
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                reason = error.__context__ or error  # what was raised here, where that is the reason
                return Failure(FailureKind.PROTOCOL, f"the response is not HTTP/1.1: {reason}")
            if self._body:
                found = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                if not listener.body(found, now_seconds):
                    return None
            if self._is_whole:
                self.reusable = is_whole and self._keeps_alive
                return None
