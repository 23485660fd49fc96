"""The whole server without sockets: front end, API and an engine without weights, connected to clients in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import trio

from trioserve.api.app import BaseApp
from trioserve.api.caller import AccessRules
from trioserve.api.images.image_context import EditSlots, UnsentImages
from trioserve.api.images.image_routes import ImageApp
from trioserve.api.limits import BackgroundSettings, BatchSettings, ConnectionSettings, DetachSettings
from trioserve.api.page import PageSettings
from trioserve.api.routes import App
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.store.settings import StoreSettings
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine
from trioserve.testing.inline_work import InlineDecoder, InlineImages, InlineStore, JobGate, open_inline_store
from trioserve.testing.memory_client import MemoryClient, MemoryEnd, memory_connection
from trioserve.testing.memory_websocket import MemoryWebSocket
from trioserve.trio_tools.own_run import opened_once

__all__ = ["MemoryFrontend", "MemoryImageServer", "MemoryServer", "open_memory_image_server", "open_memory_server"]


EngineT = TypeVar("EngineT", bound=FakeEngine | FakeImageEngine)
AppT = TypeVar("AppT", bound=BaseApp[Any])


class MemoryFrontend:
    """A front end with clients in memory.

    Args:
        server: the front end.
        nursery: runs one task per connection.
    """

    def __init__(self, server: FrontendServer, nursery: trio.Nursery) -> None:
        self.server = server
        self._nursery = nursery
        self._clients: list[MemoryEnd] = []

    def client(self, *, http: int = 1, headers: dict[str, str] | None = None) -> MemoryClient:
        """Return a client with its own connection.

        Args:
            http: 1 for HTTP/1.1, 2 for HTTP/2.
            headers: headers that the client sends with every request.
        """
        return MemoryClient(self.connect(), http=http, headers=headers)

    @asynccontextmanager
    async def websocket(
        self, path: str, *, headers: Mapping[str, str] | None = None, http: int = 1
    ) -> AsyncIterator[MemoryWebSocket]:
        """Open a websocket over a connection of its own. At the end of the context, the client leaves without a close
        frame if the websocket is still open.

        Args:
            path: path and query.
            headers: additional header fields of the opening handshake.
            http: 1 for HTTP/1.1, 2 for HTTP/2.

        Raises:
            WebSocketRefused: the server refused the websocket.
        """
        websocket = MemoryWebSocket(self.connect(), http=http)
        try:
            await websocket.open(path, headers)
            yield websocket
        finally:
            websocket.leave()

    def connect(self) -> MemoryEnd:
        """Return the client's end of a new connection, for a test that writes the HTTP protocol itself."""
        client, server_end = memory_connection()
        self._nursery.start_soon(self.server.serve_connection, server_end)
        self._clients.append(client)
        return client

    async def hang_up(self) -> None:
        """Close the client's end of every connection."""
        while self._clients:
            await self._clients.pop().aclose()

    @property
    def connection_count(self) -> int:
        return len(self._nursery.child_tasks)


class ServedInMemory(MemoryFrontend, Generic[EngineT, AppT]):
    """An engine behind an API and a front end, with clients in memory.

    Args:
        engine: the engine.
        server: the front end.
        app: the API.
        nursery: runs one task per connection.
    """

    def __init__(self, engine: EngineT, server: FrontendServer, app: AppT, nursery: trio.Nursery) -> None:
        super().__init__(server, nursery)
        self.engine = engine
        self.app = app

    def announce_drain(self) -> None:
        """Begin to stop, as the server does at SIGTERM. It still answers HTTP, but refuses new and queued requests."""
        self.engine.drain()
        self.server.announce_drain()

    def drain(self) -> None:
        """Stop, as the server does after its last request. It closes all connections and accepts no new connections."""
        self.engine.drain()
        self.server.drain()

    async def assert_all_free(self) -> None:
        """Assert that no request uses a resource of the engine or of the front end.

        First, this method waits until all other tasks are idle. See FakeEngine.assert_all_free.

        Raises:
            AssertionError: a resource is in use.
        """
        await self.engine.finish_step()
        self.engine.assert_all_free()
        counters = self.server.counters()
        assert counters.exchanges_open == 0, f"{counters.exchanges_open} requests are still open in the front end"
        assert counters.websockets_open == 0, f"{counters.websockets_open} websockets are still open in the front end"
        assert counters.request_body_bytes_held == 0, f"{counters.request_body_bytes_held} bytes of bodies are held"


class MemoryServer(ServedInMemory[FakeEngine, App]):
    """A text server in memory. `open_memory_server` creates it.

    Attributes:
        store: the server's store. A test can simulate a full disk.
    """

    store: InlineStore

    def announce_drain(self) -> None:
        self.app.drain()
        super().announce_drain()

    def drain(self) -> None:
        self.app.drain()
        super().drain()


class MemoryImageServer(ServedInMemory[FakeImageEngine, ImageApp]):
    """An image server in memory. `open_memory_image_server` creates it.

    Attributes:
        threads: gate of the jobs that encode images for responses.
        decoder: gate of the jobs that decode uploaded images.
    """

    threads: JobGate
    decoder: JobGate


@opened_once
async def open_memory_server(
    *,
    limits: FrontendLimits | None = None,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    access: AccessRules | None = None,
    page: PageSettings | None = None,
    background: BackgroundSettings | None = None,
    connections: ConnectionSettings | None = None,
    batches: BatchSettings | None = None,
    detaching: DetachSettings | None = None,
    router_grace: DetachSettings | None = None,
    store_settings: StoreSettings | None = None,
    store_directory: Path | None = None,
    tracer: Tracer = NO_TRACER,
    logs_requests: bool = False,
    **engine_options: Any,
) -> AsyncIterator[MemoryServer]:
    """Open a server in memory with an engine without weights.

    Args:
        limits, api_keys, admin_api_key, access, page, background, connections, batches, detaching, router_grace: as the
        server's flags. None: the defaults, except that the status page keeps no history.
        store_settings: limits of the store. Its times to live use the clock of the Trio program.
        store_directory: existing folder for the store. None: the store is in memory.
        tracer: receives the spans of requests.
        logs_requests: if True, write one log line per request.
        **engine_options: options of open_fake_engine.
    """
    with open_inline_store(store_directory, store_settings) as store:
        async with open_fake_engine(**engine_options) as engine:
            app = App(
                engine,
                api_keys=api_keys,
                admin_api_key=admin_api_key,
                access=access,
                page=page or PageSettings(history_seconds=0, pauses_per_cost=0),
                store=store,
                background=background,
                connections=connections,
                batches=batches,
                detaching=detaching,
                router_grace=router_grace,
                tracer=tracer,
                logs_requests=logs_requests,
            )
            engine.tracer = tracer
            async with app.running(), trio.open_nursery() as nursery:
                server = FrontendServer(app, limits=limits, knows_caller=app.knows_caller)
                served = MemoryServer(engine, server, app, nursery)
                served.store = store
                yield served
                nursery.cancel_scope.cancel()


@opened_once
async def open_memory_image_server(
    *,
    limits: FrontendLimits | None = None,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    access: AccessRules | None = None,
    page: PageSettings | None = None,
    uploads: ImageLimits | None = None,
    edits: EditSlots | None = None,
    unsent: UnsentImages | None = None,
    logs_requests: bool = False,
    request_limits: ImageRequestLimits | None = None,
    **engine_options: Any,
) -> AsyncIterator[MemoryImageServer]:
    """Open an image server in memory with an engine without weights.

    Args:
        limits, api_keys, admin_api_key, access, page, edits, unsent: as the server's flags. None: the defaults.
        uploads: limits of uploaded images. None: the pixel limit of the engine.
        logs_requests: if True, write one log line per request.
        request_limits: limits of the fields of a request.
        **engine_options: options of open_fake_image_engine.
    """
    async with open_fake_image_engine(limits=request_limits, **engine_options) as engine:
        threads = InlineImages()
        decoder = InlineDecoder(uploads or ImageLimits(pixels_max=engine.limits.pixels_max), engine.metrics)
        app = ImageApp(
            engine,
            decoder,
            api_keys=api_keys,
            admin_api_key=admin_api_key,
            access=access,
            page=page,
            edits=edits,
            unsent=unsent,
            threads=threads,
            logs_requests=logs_requests,
        )
        async with trio.open_nursery() as nursery:
            server = FrontendServer(app, limits=limits, knows_caller=app.knows_caller)
            served = MemoryImageServer(engine, server, app, nursery)
            served.threads, served.decoder = threads.gate, decoder.gate
            yield served
            nursery.cancel_scope.cancel()
