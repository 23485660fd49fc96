"""Images encoded in the compute thread, between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trioserve.contracts.images import Tiles
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["Encoding", "ThreadedImageEncoder"]


class Encoding(Protocol):
    """One image under way. rows: see ImageEncoder.encode, when advance has said that it is done."""

    @property
    def rows(self) -> object: ...

    def advance(self) -> bool:
        """Compute a piece of it. True: that was all."""
        ...


class ThreadedImageEncoder:
    """An ImageEncoder. begin: of what computes, to be called in the thread. A piece is asked for when the one before it
    is done, so a step that waits meanwhile comes first."""

    def __init__(self, begin: Callable[[Tiles], Encoding], thread: WorkerThread) -> None:
        self._begin = begin
        self._thread = thread

    async def encode(self, tiles: Tiles) -> object:
        encoding = await self._thread.run_cancellable(self._begin, tiles)
        while not await self._thread.run_cancellable(encoding.advance):
            pass
        return encoding.rows
