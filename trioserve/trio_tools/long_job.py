"""A job of a worker thread that may take minutes, such as loading a model, and ends soon when nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["JobCancelled", "LongJob"]

T = TypeVar("T")


class JobCancelled(Exception):
    """Raised in the job's thread."""


class LongJob:
    """One job: `await job.run(thread, function)`, where the function calls `job.check()` now and then."""

    def __init__(self) -> None:
        self._is_cancelled = trio.Event()  # set by the event loop, read in the thread

    def check(self) -> None:
        """Raises JobCancelled if whoever waited was cancelled."""
        if self._is_cancelled.is_set():
            raise JobCancelled

    def cancel(self) -> None:
        """Nobody waits any more: the next check ends the job."""
        self._is_cancelled.set()

    async def run(self, thread: WorkerThread, function: Callable[..., T], *arguments: Any) -> T:
        """WorkerThread.run: waits for its end also when cancelled, and raises Cancelled then, whatever it said."""
        try:
            return await thread.run(function, *arguments, on_cancel=self._is_cancelled.set)
        except Exception:
            if self._is_cancelled.is_set():  # what the job says then is not the reason
                await trio.sleep_forever()  # raises Cancelled
            raise
