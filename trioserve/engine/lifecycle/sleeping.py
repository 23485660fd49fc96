"""The sleep states of an engine, and who may wait for which. All decisions are synchronous.

    AWAKE ──fall_asleep──► FALLING ──note_down──► DOWN ──note_up──► AWAKE

A call to wake up may come at any time from FALLING on. The engine wakes up only after it reached DOWN, so memory is
always released and allocated completely. The supervisor releases and allocates the memory.
"""

from __future__ import annotations

import enum

import trio

__all__ = ["LEVELS", "SleepState", "Sleeping"]

LEVELS = {1: "weights_offloaded", 2: "discard_all"}
"""Sleep levels, named as in vLLM's metric. Level 1 releases the KV cache. Level 2 also releases the weights."""


class SleepState(enum.Enum):
    AWAKE = "awake"
    FALLING = "falling"
    DOWN = "down"


class Sleeping:
    """Sleep state of one engine.

    Attributes:
        state: the current state.
        level: the sleep level. 0: awake.
    """

    def __init__(self) -> None:
        self.state = SleepState.AWAKE
        self.level = 0
        self._is_woken = False
        self._is_over = False
        self._count = 0  # number of sleeps so far, so that a waiter for one sleep does not wait for the next one
        self._waiting = trio.lowlevel.ParkingLot()  # for a change of any of these attributes

    @property
    def is_waking(self) -> bool:
        return self.level > 0 and self._is_woken

    def fall_asleep(self, level: int) -> None:
        assert self.state is SleepState.AWAKE, f"the engine is {self.state.value}"
        self.state, self.level, self._is_woken = SleepState.FALLING, level, False
        self._count += 1
        self._waiting.unpark_all()

    def note_down(self) -> None:
        """Note that the memory is released."""
        self.state = SleepState.DOWN
        self._waiting.unpark_all()

    def wake(self) -> None:
        """Request to wake up. No effect if the engine is awake."""
        self._is_woken = True
        self._waiting.unpark_all()

    def note_up(self) -> None:
        """Note that all memory is allocated and loaded again."""
        self.state, self.level = SleepState.AWAKE, 0
        self._waiting.unpark_all()

    def end(self) -> None:
        """Release all waiters, because the engine will not wake up any more."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_down(self) -> None:
        """Wait until the memory of the current sleep is released, or that sleep has ended."""
        count = self._count
        while self.state is SleepState.FALLING and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_up(self) -> None:
        """Wait until the current sleep has ended, even if another sleep begins at once."""
        count = self._count
        while self.level and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_woken(self) -> None:
        """Wait for a request to wake up. Returns at once if the engine is awake."""
        while self.level and not self._is_woken:
            await self._waiting.park()
