"""Where pictures that a model has made become files: in threads, a few at a time. A picture takes up to a second.

What clients send is decoded in processes: see ImageDecoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

__all__ = ["PictureThreads"]

T = TypeVar("T")

THREADS_MAX = 2  # at a time: what computes pictures needs the other cores


class PictureThreads:
    """Whoever is cancelled leaves at once; a thread goes on to its end then, and keeps its place so long."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._places = trio.CapacityLimiter(threads_max)

    async def run(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=self._places, abandon_on_cancel=True)
