"""Whether an engine is awake, about to sleep, asleep, or about to wake up. What decides is synchronous.

    AWAKE ──fall_asleep──► FALLING ──note_down──► DOWN ──note_up──► AWAKE

It is told to wake up at any time from FALLING on, and does so when it is down: memory is given back whole, and taken
whole. What gives it back and takes it is the supervisor's.
"""

from __future__ import annotations

import enum

import trio

__all__ = ["LEVELS", "SleepState", "Sleeping"]

LEVELS = {1: "weights_offloaded", 2: "discard_all"}
"""What is given back: 1: the KV cache; 2: the weights, too. As vLLM's metric calls it."""


class SleepState(enum.Enum):
    AWAKE = "awake"
    FALLING = "falling"
    DOWN = "down"


class Sleeping:
    """level: 0 while it is awake."""

    def __init__(self) -> None:
        self.state = SleepState.AWAKE
        self.level = 0
        self._is_woken = False
        self._is_over = False
        self._count = 0  # of sleeps: who waits for the end of one does not wait for that of the next
        self._waiting = trio.lowlevel.ParkingLot()  # for a change of any of these

    @property
    def is_waking(self) -> bool:
        return self.level > 0 and self._is_woken

    def fall_asleep(self, level: int) -> None:
        assert self.state is SleepState.AWAKE, f"it is {self.state.value}"
        self.state, self.level, self._is_woken = SleepState.FALLING, level, False
        self._count += 1
        self._waiting.unpark_all()

    def note_down(self) -> None:
        """The memory is given back."""
        self.state = SleepState.DOWN
        self._waiting.unpark_all()

    def wake(self) -> None:
        """Nothing to do if it is awake."""
        self._is_woken = True
        self._waiting.unpark_all()

    def note_up(self) -> None:
        """All is there again."""
        self.state, self.level = SleepState.AWAKE, 0
        self._waiting.unpark_all()

    def end(self) -> None:
        """It will not wake up any more: nobody waits for it."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_down(self) -> None:
        """Returns when the memory is given back, or all is there again."""
        count = self._count
        while self.state is SleepState.FALLING and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_up(self) -> None:
        """Returns when all is there again, also if it has fallen asleep anew by then."""
        count = self._count
        while self.level and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_woken(self) -> None:
        """Returns when it is told to wake up, or is awake."""
        while self.level and not self._is_woken:
            await self._waiting.park()
