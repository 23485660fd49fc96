"""The whole server but the sockets: front end, API and an engine without weights, joined to clients in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import memory_stream_pair

from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.routes import App
from trioserve.frontend.server import FrontendServer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

__all__ = ["MemoryServer", "open_memory_server"]

ClientStream = trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]


class MemoryServer:
    """fake: the engine, to look at and to hold. server: the front end. connect() gives a client its end."""

    def __init__(self, fake: FakeEngine, server: FrontendServer, nursery: trio.Nursery) -> None:
        self.fake = fake
        self.server = server
        self._nursery = nursery
        self._clients: list[ClientStream] = []

    def connect(self) -> ClientStream:
        client, server_end = memory_stream_pair()
        self._nursery.start_soon(self.server.serve_connection, server_end)
        self._clients.append(client)
        return client

    async def hang_up(self) -> None:
        """Close every client's end."""
        while self._clients:
            await self._clients.pop().aclose()

    @property
    def connection_count(self) -> int:
        return len(self._nursery.child_tasks)


@asynccontextmanager
async def open_memory_server(
    *, limits: FrontendLimits | None = None, **engine_options: Any
) -> AsyncIterator[MemoryServer]:
    """engine_options: see open_fake_engine."""
    async with open_fake_engine(**engine_options) as fake, trio.open_nursery() as nursery:
        yield MemoryServer(fake, FrontendServer(App(fake.engine), limits=limits), nursery)
        nursery.cancel_scope.cancel()
