"""Provides asyncio hosts that serve an app on a port inside of an `async with` block, and a client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import hypercorn.asyncio
import uvicorn
from hypercorn.config import Config as HypercornConfig

from .conftest import until

App = Callable[..., Any]


@asynccontextmanager
async def under_uvicorn(app: App, **options: Any) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=1, **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or serving.done())
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def under_hypercorn(app: App) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = HypercornConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = config.accesslog = None
    config.graceful_timeout = 1
    ended = asyncio.Event()
    serving = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=ended.wait))
    try:
        yield port
    finally:
        ended.set()
        await serving


HOSTS = [under_uvicorn, under_hypercorn]


class Client:
    """One request over TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, path: str, body: dict[str, object] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        fields = (
            f"host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
        await self._writer.drain()

    async def response(self) -> tuple[int, str]:
        text = (await self._reader.read()).decode()
        return int(text.split()[1]), text.partition("\r\n\r\n")[2]

    async def read_until(self, text: bytes) -> None:
        await self._reader.readuntil(text)

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        await client.leave()


async def ask(port: int, path: str, body: dict[str, object] | None = None) -> tuple[int, str]:
    async with connect(port) as client:
        await client.ask(path, body)
        return await client.response()
