"""Provides a fake engine in an asyncio program, and helper functions for tests."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

from trioserve.asyncio.engine import Engine, in_a_thread
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine


class Fake:
    """A fake engine.

    Attributes:
        engine: the asyncio engine that the program uses.
        fake: the Trio engine. Use it only in its thread.
    """

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.on_trio, FakeEngine)
        self.engine = engine
        self.fake = engine.on_trio

    async def step(self, count: int = 1) -> None:
        await self.engine.thread.run(functools.partial(self.fake.step, count))

    async def settle(self) -> None:
        """Wait until all tasks in the engine's thread are blocked."""
        await self.engine.thread.run(wait_all_tasks_blocked)

    async def until_queued(self, count: int) -> None:
        """Wait until a number of requests wait in the queue or run."""
        await until(lambda: len(self.engine.live_requests()) >= count)
        await self.settle()

    def assert_all_free(self) -> None:
        self.engine.thread.call(self.fake.assert_all_free)

    @property
    def blocks_used(self) -> int:
        return self.engine.stats().blocks_used


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition until another thread has made it true."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@asynccontextmanager
async def open_fake(**options: Any) -> AsyncIterator[Fake]:
    async with in_a_thread(functools.partial(open_fake_engine, **options)) as engine:
        yield Fake(engine)


Program = Callable[[], Awaitable[None]]


@pytest.fixture
def run() -> Iterator[Callable[[Program], None]]:
    """Return a function that runs an asyncio program and checks that no task and no thread remains."""
    before = set(threading.enumerate())

    def run_program(program: Program) -> None:
        async def main() -> None:
            await program()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

        asyncio.run(main(), debug=False)

    yield run_program
    assert not set(threading.enumerate()) - before
