"""The states in which an engine begins no step: paused, replacing weights, and asleep. All decisions are synchronous.

A request is in flight from the time when it joins the core until its end. `StepGate` is checked before each step.
`Pausing` opens and closes it. Callers can wait until a pause has taken effect:

    RUNS ──pause──► PAUSED                    the step in flight is the last
    RUNS ──pause, draining──► DRAINS          in-flight requests continue, and no new one begins
    DRAINS ──the last in-flight request has ended──► PAUSED
    DRAINS ──pause──► PAUSED
    any ──resume──► RUNS

Sleep and weight replacement are separate states that also stop the steps. An engine that was paused before them stays
paused after them. If the caller of a pause is cancelled, the engine still pauses, because the pause belongs to the
engine. The states of sleep are:

    AWAKE ──fall_asleep──► FALLING ──note_down──► DOWN ──note_up──► AWAKE

Wake-up can be requested at any time from FALLING on. The engine wakes up only after it reached DOWN, so the whole
memory is always released and then allocated again. The supervisor releases and allocates the memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import trio

__all__ = ["StepGate", "PauseState", "Pausing", "LEVELS", "SleepState", "Sleeping"]


class StepGate:
    """A gate that stops the steps while it is closed. Call every method in the thread of the engine's Trio program.

    Attributes:
        is_open: True if further steps may begin. Changed by `set_open` only.
        is_stepping: True while steps are in flight or not delivered yet. The step loop sets it, and later calls
            `end_steps`.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_stepping = False
        self._waiting = trio.lowlevel.ParkingLot()

    def set_open(self, is_open: bool) -> None:
        """Open or close the gate. Closing does not affect the step in flight. After opening, the caller must wake the
        step loop.

        Args:
            is_open: True to allow further steps.
        """
        self.is_open = is_open
        if is_open:
            self._waiting.unpark_all()

    def end_steps(self) -> None:
        """Note that all steps in flight have ended and are delivered."""
        self.is_stepping = False
        self._waiting.unpark_all()

    async def wait_until_at_rest(self) -> None:
        """Wait until the gate is closed and no step is in flight. Opening the gate also ends the wait."""
        while self.is_stepping and not self.is_open:
            await self._waiting.park()


class PauseState(enum.Enum):
    RUNS = "runs"
    DRAINS = "drains"
    PAUSED = "paused"


class Pausing:
    """The pause state of one engine.

    Args:
        gate: the gate that stops the steps.
        has_begun: returns True while requests that have begun are not finished. A pause with `drains` waits for them.
        on_resume: called when steps may begin again.
    """

    def __init__(self, gate: StepGate, has_begun: Callable[[], bool], on_resume: Callable[[], None]) -> None:
        self._gate = gate
        self._has_begun = has_begun
        self._on_resume = on_resume
        self.state = PauseState.RUNS
        self.is_asleep = False
        self._at_rest: list[Callable[[], bool]] = []
        self.is_replacing = False
        self._is_over = False
        self._waiting = trio.lowlevel.ParkingLot()  # Tasks that wait for a change of any attribute above.

    @property
    def blocks_admission(self) -> bool:
        """True if requests that are not in the core yet must wait."""
        return not self._is_over and (self.state is not PauseState.RUNS or self.is_asleep or self.is_replacing)

    def pause(self, *, drains: bool) -> None:
        """Pause the engine. No effect if the engine is already paused.

        Args:
            drains: True to let in-flight requests finish before the pause.
        """
        if self.state is not PauseState.PAUSED:
            self.state = PauseState.DRAINS if drains else PauseState.PAUSED
            self._settle()
        self.advance()

    def when_at_rest(self, do: Callable[[], bool]) -> None:
        """Register a function to be called when the engine is paused. Call this before `pause`.

        Args:
            do: called when no step may begin. If a step is still in flight, it returns False and is called again later.
                If the engine is resumed first, the function is not called any more.
        """
        self._at_rest.append(do)

    def advance(self) -> None:
        """Check the progress of a pause. Call this after a step was delivered, and when a request has left the core."""
        if self.state is PauseState.DRAINS and not self._has_begun():
            self.state = PauseState.PAUSED
            self._settle()
        if self.state is PauseState.PAUSED:
            while self._at_rest and self._at_rest[0]():
                self._at_rest.pop(0)

    def resume(self) -> None:
        self.state = PauseState.RUNS
        self._at_rest.clear()
        self._settle()

    def set_asleep(self, is_asleep: bool) -> None:
        self.is_asleep = is_asleep
        self._settle()

    def set_replacing(self, is_replacing: bool) -> None:
        """Set whether an update of the weights blocks the steps. A failed update that wrote only some weights also
        blocks them.

        Args:
            is_replacing: True to stop the steps.
        """
        self.is_replacing = is_replacing
        self._settle()

    def end(self) -> None:
        """Wake all waiting tasks, because the engine accepts no new requests, or will not compute any more."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_paused(self) -> None:
        """Wait until the engine is paused and no step is in flight. A resume or the engine's end also ends the wait."""
        while self.state is PauseState.DRAINS and not self._is_over:
            await self._waiting.park()
        if self.state is PauseState.PAUSED:
            await self._gate.wait_until_at_rest()

    async def wait_until_admitted(self) -> None:
        """Wait until new requests may begin. The wait also ends if the engine ends."""
        while self.blocks_admission:
            await self._waiting.park()

    def _settle(self) -> None:
        is_open = self.state is not PauseState.PAUSED and not self.is_asleep and not self.is_replacing
        resumes = is_open and not self._gate.is_open
        self._gate.set_open(is_open)
        self._waiting.unpark_all()
        if resumes:
            self._on_resume()


LEVELS = {1: "weights_offloaded", 2: "discard_all"}
"""Sleep levels, named as in vLLM's metric. Level 1 releases the KV cache. Level 2 also releases the weights."""


class SleepState(enum.Enum):
    AWAKE = "awake"
    FALLING = "falling"
    DOWN = "down"


class Sleeping:
    """The sleep state of one engine.

    Attributes:
        state: the current state.
        level: the sleep level. 0: awake.
    """

    def __init__(self) -> None:
        self.state = SleepState.AWAKE
        self.level = 0
        self._is_woken = False
        self._is_over = False
        # Number of sleeps so far. A task that waits for the end of one sleep does not wait for the next sleep.
        self._count = 0
        self._waiting = trio.lowlevel.ParkingLot()  # Tasks that wait for a change of any attribute above.

    @property
    def is_waking(self) -> bool:
        return self.level > 0 and self._is_woken

    def fall_asleep(self, level: int) -> None:
        assert self.state is SleepState.AWAKE, f"the engine is {self.state.value}"
        self.state, self.level, self._is_woken = SleepState.FALLING, level, False
        self._count += 1
        self._waiting.unpark_all()

    def note_down(self) -> None:
        """Note that the engine has released its memory."""
        self.state = SleepState.DOWN
        self._waiting.unpark_all()

    def wake(self) -> None:
        """Request the engine to wake up. No effect if the engine is awake."""
        self._is_woken = True
        self._waiting.unpark_all()

    def note_up(self) -> None:
        """Note that all memory is allocated and loaded again, so the engine is awake."""
        self.state, self.level = SleepState.AWAKE, 0
        self._waiting.unpark_all()

    def end(self) -> None:
        """Wake all waiting tasks, because the engine will not wake up any more."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_down(self) -> None:
        """Wait until the memory of the current sleep is released, or until that sleep has ended."""
        count = self._count
        while self.state is SleepState.FALLING and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_up(self) -> None:
        """Wait until the current sleep has ended, even if another sleep begins at once."""
        count = self._count
        while self.level and self._count == count and not self._is_over:
            await self._waiting.park()

    async def wait_until_woken(self) -> None:
        """Wait until a wake-up is requested. Return at once if the engine is awake."""
        while self.level and not self._is_woken:
            await self._waiting.park()
