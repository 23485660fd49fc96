"""Clients for HTTP/1.1 and HTTP/2 over memory streams. They can leave the server in each possible way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import trio

from trioserve.testing.memory_server import MemoryServer
from trioserve.trio_tools.http2_client import Http2ClientProtocol
from trioserve.trio_tools.http_client import ResponseEnd, ResponseResult


@dataclasses.dataclass
class Response:
    """A complete response, received over HTTP/1.1 or HTTP/2."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http1Client:
    """Sends one request over HTTP/1.1.

    Attributes:
        received: all bytes received so far.
    """

    ways_to_leave = ("close", "half-close")

    def __init__(self, server: MemoryServer) -> None:
        self.stream = server.connect()
        self.received = b""

    async def ask(self, body: dict[str, object], *, missing_bytes: int = 0, path: str = "/v1/completions") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data) + missing_bytes}\r\n\r\n"
        await self.stream.send_all(head.encode() + data)

    async def response(self) -> Response:
        """Read a response that is not an event stream."""
        while True:
            headers, _, data = self.received.partition(b"\r\n\r\n")
            if len(data) >= int(self.headers.get("content-length", "1")):
                return Response(int(headers.split()[1]), self.headers, data)
            piece = await self.stream.receive_some()
            assert piece, f"the server closed after {self.received!r}"
            self.received += piece

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response. The dict is empty until all headers have arrived."""
        lines, separator, _ = self.received.decode(errors="replace").partition("\r\n\r\n")
        if not separator:
            return {}
        fields = (line.partition(":") for line in lines.split("\r\n")[1:])
        return {name.lower(): value.strip() for name, _, value in fields}

    async def read(self) -> None:
        """Read until the server closes the connection or this client leaves."""
        try:
            async for piece in self.stream:
                self.received += piece
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    @property
    def text(self) -> str:
        return text_of(self.received)

    async def leave(self, way: str) -> None:
        if way == "close":
            await self.stream.aclose()
        elif way == "half-close":
            await self.stream.send_eof()
        else:
            raise AssertionError(way)


class Http2Client:
    """Sends one request at a time over HTTP/2, keeps its flow-control windows open, and receives the response."""

    ways_to_leave = ("close", "half-close", "reset", "goaway")

    def __init__(self, server: MemoryServer) -> None:
        self.stream = server.connect()
        self.received = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.ended = False
        self._protocol = Http2ClientProtocol(authority="test")
        self._number = 0

    @property
    def was_told_to_go(self) -> bool:
        return self._protocol.goaway is not None

    async def ask(self, body: dict[str, object], *, missing_bytes: int = 0, path: str = "/v1/completions") -> None:
        self._number = self._protocol.begin("POST", path, [], self, has_body=True)
        self._protocol.send_body(self._number, json.dumps(body).encode(), is_last=missing_bytes == 0)
        await self._flush()

    async def response(self) -> Response:
        """Read a response to its end."""
        while not self.ended:
            piece = await self.stream.receive_some()
            assert piece, f"the server closed after {self.received!r}"
            await self._take(piece)
        return Response(self.status, self.headers, self.received)

    async def read(self) -> None:
        try:
            async for piece in self.stream:
                await self._take(piece)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in fields}

    def on_body(self, data: bytes) -> None:
        self.received += data

    def on_end(self, end: ResponseEnd) -> None:
        self.ended = end.result is ResponseResult.COMPLETE

    async def _take(self, piece: bytes) -> None:
        self._protocol.receive(piece)
        await self._flush()

    async def _flush(self) -> None:
        await self.stream.send_all(self._protocol.pop_unsent())

    @property
    def text(self) -> str:
        return text_of(self.received)

    async def leave(self, way: str) -> None:
        if way == "reset" and self.ended:
            pass  # There is no stream that could be reset.
        elif way == "reset":
            self._protocol.reset(self._number)
            await self._flush()
        elif way == "goaway":
            self._protocol.send_goaway()
            await self._flush()
            await self.stream.aclose()
        elif way == "close":
            await self.stream.aclose()
        elif way == "half-close":
            await self.stream.send_eof()
        else:
            raise AssertionError(way)


def text_of(received: bytes) -> str:
    """Join the text of all events of a streamed completion.

    Args:
        received: body of the response. HTTP/1.1 headers and chunk sizes between the events are skipped.
    """
    text = ""
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise AssertionError(event)
            text += "".join(choice["text"] for choice in event["choices"])
    return text


CLIENTS: dict[str, type[Http1Client] | type[Http2Client]] = {"h1": Http1Client, "h2": Http2Client}

WAYS = [f"{name} {way}" for name, client in CLIENTS.items() for way in client.ways_to_leave]


@pytest.fixture(params=WAYS)
def leaver(request: pytest.FixtureRequest) -> tuple[Callable[[MemoryServer], Http1Client | Http2Client], str]:
    """Give a client class, and a way in which its clients can leave."""
    name, way = request.param.split(" ")
    return CLIENTS[name], way


@pytest.fixture(params=list(CLIENTS))
def new_client(request: pytest.FixtureRequest) -> type[Http1Client] | type[Http2Client]:
    """Give the client class for HTTP/1.1, and then the client class for HTTP/2."""
    return CLIENTS[request.param]


@pytest.fixture
def http1_client() -> type[Http1Client]:
    return Http1Client


@pytest.fixture
def http2_client() -> type[Http2Client]:
    return Http2Client
