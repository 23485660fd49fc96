"""An exchange without a client: the server sends a request to itself, and the exchange keeps the whole response."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from trioserve.http.exchange import Exchange, HeaderFields
from trioserve.http.headers import Headers

__all__ = ["InternalExchange", "ResponseTooLarge"]


class ResponseTooLarge(Exception):
    """The response is larger than the limit."""


class InternalExchange(Exchange):
    """An exchange whose response is kept in memory. It has no cancel scope of its own.

    Args:
        path: Path of the request.
        headers: Headers of the request.
        body: Body of the request.
        response_bytes_max: Limit for the size of the response.

    Attributes:
        status: Status of the response. None until the response begins.
        response_headers: Headers of the response.
        response: Body of the response so far.
    """

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
            raise RuntimeError("the response has been started already")
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
