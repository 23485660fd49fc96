"""The gate before each step: it stops further steps, and lets callers wait for the end of the step in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["StepGate"]


class StepGate:
    """A gate that is open until it is closed. Every method belongs to the thread of the engine's Trio program."""

    def __init__(self) -> None:
        self._is_open = True
        self._is_stepping = False
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def set_open(self, is_open: bool) -> None:
        """Open or close the gate. Closing does not affect the step in flight. After opening, the caller must wake the
        step loop.

        Args:
            is_open: True to allow further steps.
        """
        self._is_open = is_open
        if is_open:
            self._waiting.unpark_all()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Mark that steps are in flight, until they are delivered. Overlapping steps use one context together."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self._waiting.unpark_all()

    async def wait_until_at_rest(self) -> None:
        """Wait until no step is in flight while the gate is closed. Opening the gate ends the wait."""
        while self._is_stepping and not self._is_open:
            await self._waiting.park()
