"""A real server on a real socket in a thread of its own: front end, API and core; only the model is a function."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import trio

from trioserve.testing.fake_engine import FakeEngine
from trioserve.testing.memory_server import MemoryServer, open_memory_server

__all__ = ["RealServer"]

Value = TypeVar("Value")
SECONDS_MAX = 60.0


class RealServer:
    """Within `with`. url: where it serves. options: of open_memory_server. do: in its thread. After the test
    nothing of any request is left; that is asserted."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None
        self.server: MemoryServer

    def __enter__(self) -> RealServer:
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

    @property
    def engine(self) -> FakeEngine:
        return self.server.engine

    def do(self, function: Callable[..., Value], *arguments: object) -> Value:
        return trio.from_thread.run_sync(function, *arguments, trio_token=self._token)

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
            self.server = await stack.enter_async_context(open_memory_server(**self._options))
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listeners[0].socket.getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            async with trio.open_nursery() as nursery:
                await nursery.start(self.server.server.serve, listeners)
                self._is_serving.set()
                await self._leave.wait()
                nursery.cancel_scope.deadline = trio.current_time() + SECONDS_MAX
                self.server.drain()  # it returns when the last connection has ended
            await self.server.assert_all_free()
