"""The exchange that a handler gets whose stream may be detached: what it sends goes to the stream's log, and whoever
reads that passes it on."""

from __future__ import annotations

from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.http.exchange import Exchange, HeaderFields

__all__ = ["LoggedExchange"]


class LoggedExchange(Exchange):
    """asked: the exchange of the connection. body: of the request, read already."""

    def __init__(self, asked: Exchange, body: bytes, stream: DetachedStream) -> None:
        self.method, self.path, self.query = asked.method, asked.path, asked.query
        self.headers, self.http_version, self.peer = asked.headers, asked.http_version, asked.peer
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
        self._body = b""  # nobody asks for it from here on, and the response may last long
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
            raise RuntimeError("a response is started once, then sent, then finished")
