"""Whether an engine goes on, is about to pause, or pauses. What decides is synchronous; who asked may wait for it.

    RUNS ──pause──► PAUSED                    the step in flight is the last
    RUNS ──pause, draining──► DRAINS          what has begun goes on, and nothing new begins
    DRAINS ──the last of it has ended──► PAUSED
    DRAINS ──pause──► PAUSED
    any ──resume──► RUNS

Asleep is a state beside these: an engine that sleeps begins no step either, and one that was paused before is so when
it wakes up. So is having its weights replaced. A caller that leaves while it waits takes nothing back: the pause is the
engine's, not the caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import trio

from trioserve.engine.shell.step_gate import StepGate

__all__ = ["PauseState", "Pausing"]


class PauseState(enum.Enum):
    RUNS = "runs"
    DRAINS = "drains"
    PAUSED = "paused"


class Pausing:
    """has_begun: whether anything is left of what was to end first. on_going_on: called when steps may begin again."""

    def __init__(self, gate: StepGate, has_begun: Callable[[], bool], on_going_on: Callable[[], None]) -> None:
        self._gate = gate
        self._has_begun = has_begun
        self._on_going_on = on_going_on
        self.state = PauseState.RUNS
        self.is_asleep = False
        self._at_rest: list[Callable[[], bool]] = []
        self.is_replacing = False
        self._is_over = False
        self._waiting = trio.lowlevel.ParkingLot()  # for a change of any of these

    @property
    def holds_up(self) -> bool:
        """Whether what the core does not have yet may not begin."""
        return not self._is_over and (self.state is not PauseState.RUNS or self.is_asleep or self.is_replacing)

    def pause(self, *, drains: bool) -> None:
        """Nothing to do if it pauses already. drains: what has begun is to end first."""
        if self.state is not PauseState.PAUSED:
            self.state = PauseState.DRAINS if drains else PauseState.PAUSED
            self._settle()
        self.look()

    def when_at_rest(self, do: Callable[[], bool]) -> None:
        """To be called before `pause`: have `do` called when it pauses, until it says that it could be done, since no
        step is in flight. Where somebody resumes it before that, it is not done."""
        self._at_rest.append(do)

    def look(self) -> None:
        """Something may have ended: to be called when a step was delivered, and when a request has left the core."""
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
        """Weights are being replaced, or are there only in part."""
        self.is_replacing = is_replacing
        self._settle()

    def end(self) -> None:
        """The engine takes nothing new any more, or computes nothing: nobody waits for it to go on."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_paused(self) -> None:
        """Returns when it pauses and no step is in flight, or when it goes on, or is over."""
        while self.state is PauseState.DRAINS and not self._is_over:
            await self._waiting.park()
        if self.state is PauseState.PAUSED:
            await self._gate.wait_until_at_rest()

    async def wait_until_admitted(self) -> None:
        """Returns when what is new may begin, or the engine is over."""
        while self.holds_up:
            await self._waiting.park()

    def _settle(self) -> None:
        is_open = self.state is not PauseState.PAUSED and not self.is_asleep and not self.is_replacing
        goes_on = is_open and not self._gate.is_open
        self._gate.set_open(is_open)
        self._waiting.unpark_all()
        if goes_on:
            self._on_going_on()
