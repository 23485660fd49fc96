"""An exchange without a client: a request that the server makes of itself, and whose whole response is kept here."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from trioserve.http.exchange import Exchange, HeaderFields
from trioserve.http.headers import Headers

__all__ = ["InternalExchange", "ResponseTooLarge"]


class ResponseTooLarge(Exception):
    """The response has more bytes than may be kept."""


class InternalExchange(Exchange):
    """status, response_headers, response: what was answered. Its scope is that of whoever runs the handler."""

    http_version = "1.1"
    peer = "batch"

    def __init__(self, path: str, headers: Iterable[tuple[str, str]], body: bytes, *, response_bytes_max: int) -> None:
        self.method, self.path, self.query = "POST", path, ""
        self.headers = Headers(headers)
        self.status: int | None = None
        self.response_headers = Headers(())
        self.is_finished = False
        self._body = body
        self._pieces: list[bytes] = []
        self._bytes_left = response_bytes_max

    @property
    def started(self) -> bool:
        return self.status is not None

    @property
    def response(self) -> bytes:
        return b"".join(self._pieces)

    async def body(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._body

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self.start(status, headers)
        await self.finish(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        if self.started:
            raise RuntimeError("the response was started before")
        self.status = status
        self.response_headers = Headers(headers)
        await trio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        if not self.started or self.is_finished:
            raise RuntimeError("the response is not open")
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ResponseTooLarge
        self._pieces.append(data)
        await trio.lowlevel.checkpoint()

    async def finish(self, last: bytes = b"") -> None:
        await self.send(last)
        self.is_finished = True
