"""A task that writes for all HTTP/2 connections, at most once per pass of Trio's scheduler.

An engine step wakes the handlers of all its requests in one pass, and each handler queues its events. If each
connection used its own writer task, 64 connections would need 64 more task switches, and a task switch costs more than
a write. The flusher writes only bytes that the kernel accepts at once. If a client is slow, the connection's own writer
task sends the rest, because that task can wait.
"""

from __future__ import annotations

from typing import Protocol

import trio

__all__ = ["Flushable", "Flusher"]


class Flushable(Protocol):
    def flush(self) -> None:
        """Write without waiting. This method raises nothing: the connection handles its own errors."""


class Flusher:
    """A list of connections that have bytes to write, and the task that writes them."""

    def __init__(self) -> None:
        self._waiting: list[Flushable] = []
        self._wake = trio.Event()

    def add(self, connection: Flushable) -> None:
        """Flush a connection in the next pass of the scheduler, when all handlers of this pass have run.

        Args:
            connection: the connection. It must not be added again before it was flushed.
        """
        self._waiting.append(connection)
        self._wake.set()

    async def run(self) -> None:
        """Flush connections until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.flush()
