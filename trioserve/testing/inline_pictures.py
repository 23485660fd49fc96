"""Pictures that are written and read in the event loop, when a test lets it: real threads take no virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from trioserve.api.images.picture_threads import PictureThreads

__all__ = ["InlinePictures"]

T = TypeVar("T")


class InlinePictures(PictureThreads):
    """run_count: of what was written or read. held_count: of those that wait inside of `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.run_count = 0
        self.held_count = 0
        self._gate: trio.Event | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing is written or read: whoever asks for it waits until the end, or leaves."""
        self._gate = trio.Event()
        try:
            yield
        finally:
            self._gate.set()
            self._gate = None

    async def run(self, function: Callable[[], T]) -> T:
        """After every other task has had its turn."""
        self.held_count += 1
        try:
            await trio.lowlevel.checkpoint()
            if self._gate is not None:
                await self._gate.wait()
        finally:
            self.held_count -= 1
        self.run_count += 1
        return function()
