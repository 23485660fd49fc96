"""Whether a next step may begin, and whether one is in flight. Who closes the gate may wait for that one's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["StepGate"]


class StepGate:
    """Open until told otherwise. Every method belongs to the thread of the engine's Trio program."""

    def __init__(self) -> None:
        self._is_open = True
        self._is_stepping = False
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def set_open(self, is_open: bool) -> None:
        """The step in flight goes on in any case. Whoever opens it wakes the step loop, too."""
        self._is_open = is_open
        if is_open:
            self._waiting.unpark_all()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step is in flight, or several that overlap, until it has been delivered."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self._waiting.unpark_all()

    async def wait_until_at_rest(self) -> None:
        """Returns when no step is in flight and none begins, or the gate was opened again."""
        while self._is_stepping and not self._is_open:
            await self._waiting.park()
