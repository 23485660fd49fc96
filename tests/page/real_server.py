"""Runs a real server or router on a real socket in a thread.

The front end, the API and the core are real. The model is fake.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import trio

from trioserve.http.server import FrontendServer
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.testing.fake_engine import FakeEngine
from trioserve.testing.fake_image_engine import FakeImageEngine
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import (
    MemoryImageServer,
    MemoryServer,
    open_memory_image_server,
    open_memory_server,
)

__all__ = ["RealImageServer", "RealRouter", "RealServer"]

Value = TypeVar("Value")
ENDPOINTS = ("a", "b")
SECONDS_MAX = 60.0
LOOKS_SECONDS = 0.1  # Interval of health checks and load reports.


class RealProgram(ABC):
    """Serves inside of a `with` block, and checks at the end of the block that no request remains.

    Attributes:
        url: base URL.
    """

    def __init__(self) -> None:
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None

    def __enter__(self) -> RealProgram:
        self._thread.start()
        assert self._is_serving.wait(SECONDS_MAX)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.do(self._leave.set)
        self._thread.join(SECONDS_MAX)
        if self._error is not None and kind is None:
            raise self._error

    def do(self, function: Callable[..., Value], *arguments: object) -> Value:
        return trio.from_thread.run_sync(function, *arguments, trio_token=self._token)

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> FrontendServer:
        """Open the server on the stack and return the front end that listens."""

    @abstractmethod
    def drain(self) -> None:
        """Start to drain."""

    @abstractmethod
    async def assert_all_free(self) -> None:
        """Check that no request has left blocks, slots or leases."""

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._error = error
        finally:
            self._is_serving.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._leave = trio.Event()
        async with AsyncExitStack() as stack:
            frontend = await self.open(stack)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            async with trio.open_nursery() as nursery:
                await nursery.start(frontend.serve, listeners)
                self._is_serving.set()
                await self._leave.wait()
                nursery.cancel_scope.deadline = trio.current_time() + SECONDS_MAX
                self.drain()  # `serve` returns when the last connection has ended.
            await self.assert_all_free()


class RealServer(RealProgram):
    """Runs a server with a fake engine.

    Args:
        options: options of open_memory_server.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.server: MemoryServer

    @property
    def engine(self) -> FakeEngine:
        return self.server.engine

    async def open(self, stack: AsyncExitStack) -> FrontendServer:
        self.server = await stack.enter_async_context(open_memory_server(**self._options))
        return self.server.server

    def drain(self) -> None:
        self.server.drain()

    async def assert_all_free(self) -> None:
        await self.server.assert_all_free()


class RealImageServer(RealProgram):
    """Runs an image server with a fake engine.

    Args:
        options: options of open_memory_image_server.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self.server: MemoryImageServer

    @property
    def engine(self) -> FakeImageEngine:
        return self.server.engine

    async def open(self, stack: AsyncExitStack) -> FrontendServer:
        self.server = await stack.enter_async_context(open_memory_image_server(**self._options))
        return self.server.server

    def drain(self) -> None:
        self.server.drain()

    async def assert_all_free(self) -> None:
        await self.server.assert_all_free()


class RealRouter(RealProgram):
    """Runs a router that sends requests to two servers with the ids "a" and "b".

    `kill` breaks all connections of a server and refuses new connections. `revive` accepts connections again.

    Args:
        options: options of open_memory_server, for both servers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._killed: set[str] = set()
        self.servers: dict[str, MemoryServer] = {}
        self.router: MemoryRouter

    async def open(self, stack: AsyncExitStack) -> FrontendServer:
        for id in ENDPOINTS:
            self.servers[id] = await stack.enter_async_context(open_memory_server(**self._options))
        watch = WatchSettings(health_seconds=LOOKS_SECONDS, load_seconds=LOOKS_SECONDS)
        endpoints = {id: self._opener(id) for id in ENDPOINTS}
        self.router = await stack.enter_async_context(open_memory_router(endpoints, watch=watch))
        return self.router.server

    def _opener(self, id: str) -> Callable[[], Any]:
        async def connect() -> trio.abc.Stream:
            await trio.lowlevel.checkpoint()
            if id in self._killed:
                raise ConnectionRefusedError(111, "Connection refused")
            return self.servers[id].connect()

        return connect

    def where(self, request_id: str) -> str:
        """Return the id of the endpoint that has the request, or "" if no endpoint has it."""
        for id, server in self.servers.items():
            if any(request.id == request_id for request in self.do(server.engine.live_requests)):
                return id
        return ""

    def kill(self, id: str) -> None:
        self.do(self._killed.add, id)
        trio.from_thread.run(self.servers[id].hang_up, trio_token=self._token)

    def revive(self, id: str) -> None:
        self.do(self._killed.discard, id)

    def drain(self) -> None:
        self.router.drain()

    async def assert_all_free(self) -> None:
        await self.router.assert_all_free()
        for server in self.servers.values():
            # Check only the engine, because a health check of the router may still be open.
            server.engine.assert_all_free()
