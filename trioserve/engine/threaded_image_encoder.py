"""Encodes images in the compute thread, between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trioserve.contracts.images import Tiles
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["Encoding", "ThreadedImageEncoder"]


class Encoding(Protocol):
    """The encoding of one image.

    Attributes:
        rows: the result, when `advance` has returned True. See `ImageEncoder.encode`.
    """

    @property
    def rows(self) -> object: ...

    def advance(self) -> bool:
        """Compute a part of the encoding. Return True if it is complete."""
        ...


class ThreadedImageEncoder:
    """Encodes images in the compute thread. Implements `ImageEncoder`.

    Images are encoded in parts. Each part is submitted when the previous one is done, so a waiting step runs first.

    Args:
        begin: begins an encoding. Called in the compute thread.
        thread: the compute thread.
    """

    def __init__(self, begin: Callable[[Tiles], Encoding], thread: WorkerThread) -> None:
        self._begin = begin
        self._thread = thread

    async def encode(self, tiles: Tiles) -> object:
        encoding = await self._thread.run_cancellable(self._begin, tiles)
        while not await self._thread.run_cancellable(encoding.advance):
            pass
        return encoding.rows
