"""One task that writes for all connections, once for each pass of the scheduler in which they have something to say.

A step of the engine wakes the handlers of all its requests in one pass, and they queue their events. With a writer
each, 64 connections would take 64 more task switches for them, each dearer than its write. The flusher writes what the
kernel takes at once; a connection whose client is slow goes on in a writer of its own, which can wait.
"""

from __future__ import annotations

from typing import Protocol

import trio

__all__ = ["Flushable", "Flusher"]


class Flushable(Protocol):
    def flush(self) -> None:
        """Write without waiting. Whatever goes wrong is this connection's affair: nothing is raised."""


class Flusher:
    def __init__(self) -> None:
        self._waiting: list[Flushable] = []
        self._wake = trio.Event()

    def add(self, connection: Flushable) -> None:
        """It has something to write, and will be asked for it once, when everybody has had their turn."""
        self._waiting.append(connection)
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.flush()
