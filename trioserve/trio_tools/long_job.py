"""Jobs of a worker thread that may take minutes, such as loading a model, and end early when their caller is
cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import trio

from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["JobCancelled", "LongJob"]

T = TypeVar("T")


class JobCancelled(Exception):
    """The caller of the job was cancelled. Raised in the job's thread."""


class LongJob:
    """One job: `await job.run(thread, function)`, where the function calls `job.check()` often."""

    def __init__(self) -> None:
        self._is_cancelled = trio.Event()  # set by the event loop, read in the thread

    def check(self) -> None:
        """Raise an error if the caller no longer waits.

        Raises:
            JobCancelled: the caller was cancelled.
        """
        if self._is_cancelled.is_set():
            raise JobCancelled

    def cancel(self) -> None:
        """Make the next check raise JobCancelled."""
        self._is_cancelled.set()

    async def run(self, thread: WorkerThread, function: Callable[..., T], *arguments: Any) -> T:
        """Run the job in a thread and wait for its end, even if the caller is cancelled.

        If the caller is cancelled, Cancelled is raised, whatever the job returns or raises.

        Args:
            thread: Thread that runs the job.
            function: Function to call.
            arguments: Arguments of the function.
        """
        try:
            return await thread.run(function, *arguments, on_cancel=self._is_cancelled.set)
        except Exception:
            if self._is_cancelled.is_set():  # then the job's error is only a consequence of the cancellation
                await trio.sleep_forever()  # this raises Cancelled
            raise
