"""The pause states of an engine. All decisions are synchronous. Callers may wait for their effect.

    RUNS ──pause──► PAUSED                    the step in flight is the last
    RUNS ──pause, draining──► DRAINS          begun requests continue, and no new one begins
    DRAINS ──the last begun request has ended──► PAUSED
    DRAINS ──pause──► PAUSED
    any ──resume──► RUNS

Sleep and weight replacement are separate states. They also stop the steps. An engine that was paused before is still
paused after them. A caller that stops waiting does not undo the pause, because the pause belongs to the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import trio

from trioserve.engine.lifecycle.step_gate import StepGate

__all__ = ["PauseState", "Pausing"]


class PauseState(enum.Enum):
    RUNS = "runs"
    DRAINS = "drains"
    PAUSED = "paused"


class Pausing:
    """Pause state of one engine.

    Args:
        gate: the gate that stops the steps.
        has_begun: returns True while a draining pause must wait for begun requests.
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
        self._waiting = trio.lowlevel.ParkingLot()  # for a change of any of these attributes

    @property
    def holds_up(self) -> bool:
        """True if requests that are not in the core yet must wait."""
        return not self._is_over and (self.state is not PauseState.RUNS or self.is_asleep or self.is_replacing)

    def pause(self, *, drains: bool) -> None:
        """Pause. No effect if the engine is paused already.

        Args:
            drains: True to let begun requests end first.
        """
        if self.state is not PauseState.PAUSED:
            self.state = PauseState.DRAINS if drains else PauseState.PAUSED
            self._settle()
        self.look()

    def when_at_rest(self, do: Callable[[], bool]) -> None:
        """Register a function to be called when the engine is paused. Call this before `pause`.

        Args:
            do: called when no step may begin. It returns False if a step is still in flight, and is then called again
                later. A resume before that drops the function.
        """
        self._at_rest.append(do)

    def look(self) -> None:
        """Check for progress of a pause. Call this after a step was delivered, and when a request has left the core."""
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
        """Set whether weights are being replaced, or are only replaced in part.

        Args:
            is_replacing: True to stop the steps.
        """
        self.is_replacing = is_replacing
        self._settle()

    def end(self) -> None:
        """Release all waiters, because the engine accepts no new requests, or computes nothing any more."""
        self._is_over = True
        self._waiting.unpark_all()

    async def wait_until_paused(self) -> None:
        """Wait until the engine is paused and no step is in flight. A resume or the engine's end also ends the wait."""
        while self.state is PauseState.DRAINS and not self._is_over:
            await self._waiting.park()
        if self.state is PauseState.PAUSED:
            await self._gate.wait_until_at_rest()

    async def wait_until_admitted(self) -> None:
        """Wait until new requests may begin, or the engine ends."""
        while self.holds_up:
            await self._waiting.park()

    def _settle(self) -> None:
        is_open = self.state is not PauseState.PAUSED and not self.is_asleep and not self.is_replacing
        resumes = is_open and not self._gate.is_open
        self._gate.set_open(is_open)
        self._waiting.unpark_all()
        if resumes:
            self._on_resume()
