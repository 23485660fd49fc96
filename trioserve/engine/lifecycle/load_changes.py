"""Notifies subscribers that an engine's load may have changed. The engine never waits for a subscriber."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.contracts.errors import Overloaded

__all__ = ["LoadChanges"]

READERS_MAX = 64  # Each router has one subscriber.
RETRY_SECONDS = 30.0


class LoadChanges:
    """Lets tasks wait until the load of an engine changes.

    Call every method in the thread of the engine's Trio program.

    Attributes:
        clock: random name of the engine's clock. Each opening of the engine has another name.
        is_over: True if the engine ended, so the load will not change any more.
    """

    def __init__(self) -> None:
        self.clock = secrets.token_hex(8)
        self.is_over = False
        self._reader_count = 0
        self._waiting = trio.lowlevel.ParkingLot()

    def note(self) -> None:
        """Wake the waiting tasks, because the load may have changed. Called after every step. This is cheap if no task
        waits.
        """
        if self._waiting:
            self._waiting.unpark_all()

    def end(self) -> None:
        """Wake the waiting tasks for the last time, because the engine has ended."""
        self.is_over = True
        self._waiting.unpark_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a subscriber while the context is entered. Raises Overloaded if there are too many subscribers."""
        if self._reader_count >= READERS_MAX:
            raise Overloaded(
                f"{READERS_MAX} clients follow the load of this engine already, and no more are allowed",
                reason="too_many_readers",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._reader_count += 1
        try:
            yield
        finally:
            self._reader_count -= 1

    async def wait(self) -> None:
        """Wait until the load may have changed, or the engine ends."""
        if not self.is_over:
            await self._waiting.park()
