"""Fixtures of a router in memory. Its endpoints are two servers without weights, or scripted endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.testing.memory_router import MemoryRouter, open_memory_router, open_scripted_endpoints
from trioserve.testing.memory_server import MemoryServer, open_memory_server


class Setup:
    """A router and its servers.

    Attributes:
        router: Router under test.
        servers: Servers by endpoint id.
        unreachable: Endpoints whose connections fail.
    """

    def __init__(self) -> None:
        self.router: MemoryRouter
        self.servers: dict[str, MemoryServer] = {}
        self.unreachable: set[str] = set()

    def client(self, **options: Any):
        return self.router.client(**options)

    def opener(self, id: str):
        async def connect():
            if id in self.unreachable:
                raise ConnectionRefusedError(111, "Connection refused")
            return self.servers[id].connect()

        return connect

    def leases(self) -> dict[str, int]:
        return dict(self.router.dispatch.core.stats().leases)

    async def assert_all_free(self) -> None:
        await self.router.assert_all_free()
        for server in self.servers.values():
            await server.assert_all_free()


@pytest.fixture
def read_cut() -> Callable[..., Any]:
    """Return a function that reads a response. The endpoint of the response breaks after a number of steps.

    The function returns the response, and True if the response was complete before the break.
    """

    async def read(setup: Setup, path: str, body: object, *, step: int) -> tuple[Any, bool]:
        async with setup.client().ask(path, body, headers={"x-request-id": "mine"}) as response:
            await wait_all_tasks_blocked()
            [first] = [id for id, count in setup.leases().items() if count]
            [other] = [id for id in setup.servers if id != first]
            await setup.servers[first].engine.step(step)
            await wait_all_tasks_blocked()
            is_over = not any(setup.leases().values())
            if not is_over:
                await setup.servers[first].hang_up()
                setup.servers[other].engine.resume()
            with trio.fail_after(5):
                await response.read()
            setup.servers[other].engine.pause()
        return response, is_over

    return read


@pytest.fixture
def open_setup() -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(ids: str = "ab", *, engine: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Setup]:
        setup = Setup()
        async with AsyncExitStack() as stack:
            for id in ids:
                setup.servers[id] = await stack.enter_async_context(open_memory_server(**(engine or {})))
            setup.router = await stack.enter_async_context(
                open_memory_router({id: setup.opener(id) for id in ids}, **options)
            )
            yield setup

    return opened


@pytest.fixture
def open_pair() -> Callable[..., Any]:
    return open_scripted_endpoints
