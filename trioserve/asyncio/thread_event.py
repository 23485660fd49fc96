"""What one thread tells asyncio tasks of any loop.

Nothing here keeps a task alive: the tasks of a loop that was given up can be thrown away, and so leave what they hold.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

__all__ = ["ThreadEvent", "Waiters"]


class Waiters:
    """add in asyncio tasks, wake in any thread. Who looks first at what it waits for, and adds itself afterwards, may
    wait in vain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    def add(self) -> asyncio.Future[None]:
        """To be awaited, and kept until then."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.add(future)
        return future

    def wake(self) -> bool:
        """All that wait. False: the loop of one of them is closed."""
        with self._lock:
            if not self._futures:
                return True
            futures, self._futures = list(self._futures), weakref.WeakSet()
        are_awake = True
        for future in futures:
            try:
                future.get_loop().call_soon_threadsafe(_set, future)
            except RuntimeError:
                are_awake = False
        return are_awake


class ThreadEvent:
    """Set once, in any thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters = Waiters()

    def set(self) -> None:
        self.is_set = True
        self._waiters.wake()

    def future(self) -> asyncio.Future[None]:
        """Done when it is set."""
        future = self._waiters.add()
        if self.is_set:
            _set(future)
        return future

    async def wait(self, *, cancel: Callable[[], None] = lambda: None) -> None:
        """A caller that is cancelled meanwhile stays until then, and gets its CancelledError afterwards; `cancel` is
        called, once, so that it need not stay for long."""
        cancelled: asyncio.CancelledError | None = None
        while not self.is_set:
            try:
                await self.future()
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancel()
                cancelled = error
        if cancelled is not None:
            raise cancelled


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
