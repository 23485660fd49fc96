"""Events that one thread sets and asyncio tasks of any loop wait for.

These objects keep no reference to a task. So the garbage collector can remove the tasks of an abandoned loop. Then
these tasks leave their scopes.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable

__all__ = ["ThreadEvent", "Waiters"]


class Waiters:
    """A list of asyncio tasks that wait until any thread wakes them.

    A task must call `add` before it checks its condition. Otherwise a wake-up between the check and `add` would be
    lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    def add(self) -> asyncio.Future[None]:
        """Return a future that the next `wake` completes. The caller must keep a reference to the future until it is
        done.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.add(future)
        return future

    def wake(self) -> bool:
        """Wake all waiting tasks.

        Returns:
            False if the loop of a waiting task is closed.
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
    """An event that any thread can set once."""

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
        """Wait for the event. If the caller is cancelled, it still waits, and gets its CancelledError afterwards.

        Args:
            cancel: called once if the caller is cancelled. It should make the event be set soon.
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
