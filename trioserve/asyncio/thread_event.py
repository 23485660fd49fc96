"""Events that one thread sets and asyncio tasks of any loop wait for.

These objects keep no task alive. So the tasks of an abandoned loop can be collected, which makes them leave their
scopes.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

__all__ = ["ThreadEvent", "Waiters"]


class Waiters:
    """Asyncio tasks that wait for a wake-up from any thread.

    A task must call `add` before it checks its condition. Otherwise a wake-up in between would be lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    def add(self) -> asyncio.Future[None]:
        """Return a future that the next `wake` completes. The caller must keep a reference until then."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.add(future)
        return future

    def wake(self) -> bool:
        """Wake all waiting tasks.

        Returns:
            False if the loop of one of them is closed.
        """
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
    """An event that any thread sets once."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiters = Waiters()

    def set(self) -> None:
        self.is_set = True
        self._waiters.wake()

    def future(self) -> asyncio.Future[None]:
        """Return a future that is done once the event is set."""
        future = self._waiters.add()
        if self.is_set:
            _set(future)
        return future

    async def wait(self, *, cancel: Callable[[], None] = lambda: None) -> None:
        """Wait for the event. A cancelled caller still waits, and gets its CancelledError afterwards.

        Args:
            cancel: called once at a cancellation, so that the event is set soon.
        """
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
