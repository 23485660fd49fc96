"""Two small clients, one a protocol, that can leave in every way there is."""

from __future__ import annotations

import json
from collections.abc import Callable

import h2.connection
import h2.events
import pytest
import trio

from trioserve.testing.memory_server import MemoryServer


class Http1Client:
    """One request over HTTP/1.1. received: all bytes that came."""

    ways_to_leave = ("close", "half-close")

    def __init__(self, server: MemoryServer) -> None:
        self.stream = server.connect()
        self.received = b""

    async def ask(self, body: dict[str, object], *, missing_bytes: int = 0) -> None:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data) + missing_bytes}\r\n\r\n"
        await self.stream.send_all(head.encode() + data)

    async def read(self) -> None:
        """Read until the other side closes or this client leaves."""
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
    """One request over HTTP/2, windows kept open."""

    ways_to_leave = ("close", "half-close", "reset", "goaway")

    def __init__(self, server: MemoryServer) -> None:
        self.stream = server.connect()
        self.received = b""
        self.reset_code: int | None = None
        self._connection = h2.connection.H2Connection()
        self._stream_id = 0

    async def ask(self, body: dict[str, object], *, missing_bytes: int = 0) -> None:
        connection = self._connection
        if not self._stream_id:
            connection.initiate_connection()
        self._stream_id = connection.get_next_available_stream_id()
        connection.send_headers(
            self._stream_id,
            [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "test")],
        )
        connection.send_data(self._stream_id, json.dumps(body).encode(), end_stream=missing_bytes == 0)
        await self.stream.send_all(connection.data_to_send())

    async def read(self) -> None:
        try:
            async for piece in self.stream:
                for event in self._connection.receive_data(piece):
                    if isinstance(event, h2.events.DataReceived):
                        self.received += event.data
                        self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, h2.events.StreamReset):
                        self.reset_code = event.error_code
                await self.stream.send_all(self._connection.data_to_send())
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    @property
    def text(self) -> str:
        return text_of(self.received)

    async def leave(self, way: str) -> None:
        if way == "reset":
            self._connection.reset_stream(self._stream_id, error_code=8)
            await self.stream.send_all(self._connection.data_to_send())
        elif way == "goaway":
            self._connection.close_connection()
            await self.stream.send_all(self._connection.data_to_send())
            await self.stream.aclose()
        elif way == "close":
            await self.stream.aclose()
        elif way == "half-close":
            await self.stream.send_eof()
        else:
            raise AssertionError(way)


def text_of(received: bytes) -> str:
    """The text in the events of a streamed completion, whatever frames them."""
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
    """A kind of client, and one of the ways in which it can leave."""
    name, way = request.param.split(" ")
    return CLIENTS[name], way


@pytest.fixture
def http1_client() -> type[Http1Client]:
    return Http1Client


@pytest.fixture
def http2_client() -> type[Http2Client]:
    return Http2Client
