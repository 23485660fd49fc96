"""The exchange that the handler of a detached stream gets.

It writes the response to the stream's event log, and a reader sends the log to the client.
"""

from __future__ import annotations

from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.http.exchange import Exchange, HeaderFields

__all__ = ["LoggedExchange"]


class LoggedExchange(Exchange):
    """Exchange of a detached stream.

    Args:
        original: Exchange of the connection that sent the request.
        body: Body of the request.
        stream: The stream.
    """

    def __init__(self, original: Exchange, body: bytes, stream: DetachedStream) -> None:
        self.method, self.path, self.query = original.method, original.path, original.query
        self.headers, self.http_version, self.peer = original.headers, original.http_version, original.peer
        self._body = body
        self._stream = stream

    @property
    def started(self) -> bool:
        return self._stream.has_responded.is_set()

    async def body(self) -> bytes:
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        self._check(not self.started)
        self._stream.respond((status, headers, body))

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._check(not self.started)
        self._body = b""  # The handler has read it. Free the memory, because the response may take long.
        self._stream.begin(status, headers)

    async def send(self, data: bytes) -> None:
        self._check(self._stream.head is not None and not self._stream.log.is_ended)
        await self._stream.add(data)

    async def finish(self, last: bytes = b"") -> None:
        self._check(self._stream.head is not None and not self._stream.log.is_ended)
        self._stream.end(last)

    @staticmethod
    def _check(is_in_order: bool) -> None:
        if not is_in_order:
            raise RuntimeError("wrong order of calls: a response is started once, then sent, then finished")
