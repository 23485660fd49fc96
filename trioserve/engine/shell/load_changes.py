"""Tells those who follow an engine's load that it may be another one now. The engine never waits for one of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.contracts.errors import Overloaded

__all__ = ["LoadChanges"]

READERS_MAX = 64  # routers before one engine
RETRY_SECONDS = 30.0


class LoadChanges:
    """clock: names the engine's clock, like no other's. Every method belongs to the thread of its Trio program."""

    def __init__(self) -> None:
        self.clock = secrets.token_hex(8)
        self.is_over = False
        self._reader_count = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def note(self) -> None:
        """It may be another one. Called after every step: costs nothing while nobody waits."""
        if self._waiting:
            self._waiting.unpark_all()

    def end(self) -> None:
        """Let the readers go: the engine is leaving."""
        self.is_over = True
        self._waiting.unpark_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises Overloaded when too many read already."""
        if self._reader_count >= READERS_MAX:
            raise Overloaded(
                f"{READERS_MAX} follow the load of this engine already, and no more may",
                reason="too_many_readers",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._reader_count += 1
        try:
            yield
        finally:
            self._reader_count -= 1

    async def wait(self) -> None:
        """Returns when it may be another one, or nothing more will come."""
        if not self.is_over:
            await self._waiting.park()
