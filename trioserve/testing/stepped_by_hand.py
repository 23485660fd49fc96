"""What a test does with an engine's steps: it lets one happen, holds its forward pass open, or has it break."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.ids import RequestId
from trioserve.engine.shell.requests_by_id import RequestsById
from trioserve.engine.shell.stepped_core import AnyPlan
from trioserve.testing.controlled_steps import ControlledSteps
from trioserve.testing.gated_core import GatedSteps

__all__ = ["InjectedFault", "SteppedByHand"]

STEPS_IN_FLIGHT_MAX = 2

PlanT = TypeVar("PlanT", bound=AnyPlan)


class InjectedFault(Exception):
    """What breaks an engine or a request because a test wants it to."""


class FailsRequests(Protocol):
    """errors: of requests whose next forward pass fails."""

    errors: dict[RequestId, str]


class SteppedByHand(Generic[PlanT]):
    """Stands before an engine among the parents of a class. core, steps: the engine's."""

    core: GatedSteps
    steps: ControlledSteps[PlanT, Any]
    executor: FailsRequests
    broken_openings = 0
    wake: Any  # the engine's
    _requests: RequestsById[Any]

    # --- when it steps ---

    def pause(self) -> None:
        """From now on no step begins by itself. One that is in flight goes on."""
        self.core.is_paused = True

    def resume(self) -> None:
        """The engine steps by itself again."""
        self.core.is_paused = False
        self.wake()

    async def step(self, count: int = 1) -> PlanT | None:
        """Let one step happen, or several: schedule, forward pass, aborts, update, deliver. Before and after it, every
        other task does what it can.

        Returns the last step's plan, or None when there was nothing to compute. The engine has to be paused.
        """
        assert self.core.is_paused, "the engine steps by itself: pause() it, or open it with paused=True"
        plan = None
        for _ in range(count):
            plan = await self._begin_held_step()
            if plan is None:
                break
            await self._end_held_step()
        return plan

    async def finish_step(self) -> None:
        """Wait for the end of the step in flight, so that what its requests had is free. Other tasks do what they can
        before and after. A step that a test holds is not waited for."""
        await wait_all_tasks_blocked()
        for _ in range(STEPS_IN_FLIGHT_MAX):
            if self.steps.plan is None or self.steps.is_held:
                break
            await self.core.asked_again()
            await wait_all_tasks_blocked()

    @asynccontextmanager
    async def held_step(self) -> AsyncIterator[PlanT]:
        """The next step, with its forward pass held open inside the `async with`: the blocks of its requests are being
        read there, and come back right after. On the way out it computes, and all goes as in step().

        Of an engine that is not paused, it is the first step that begins. Raises AssertionError if none does.
        """
        plan = await self._begin_held_step()
        assert plan is not None, "no step begins: no request waits or runs"
        try:
            yield plan
        except BaseException:
            self.steps.release()
            raise
        await self._end_held_step()

    async def _begin_held_step(self) -> PlanT | None:
        """None, and nothing held, if there is nothing to compute."""
        await wait_all_tasks_blocked()
        self.steps.hold()
        if self.core.is_paused:
            self.core.give_step()
        try:
            self.wake()
            await wait_all_tasks_blocked()
            while self.steps.plan is not None and not self.steps.is_held:  # one that had begun before
                await self.core.asked_again()
                await wait_all_tasks_blocked()
            plan = self.steps.plan
        except BaseException:
            self._give_up_step()
            raise
        if plan is None:
            self._give_up_step()
        return plan

    def _give_up_step(self) -> None:
        self.core.take_back_step()
        self.steps.release()

    async def _end_held_step(self) -> None:
        self.steps.release()
        await self.core.asked_again()
        await wait_all_tasks_blocked()

    @property
    def step_seconds(self) -> float:
        """What a forward pass takes, in the clock's time. Change it at any moment; it goes for the next one."""
        return self.steps.seconds

    @step_seconds.setter
    def step_seconds(self, seconds: float) -> None:
        self.steps.seconds = seconds

    # --- what goes wrong ---

    def break_next_step(self, error: Exception | None = None) -> None:
        """The next forward pass raises: a fault of the engine, which ends it. Default: an InjectedFault."""
        self.steps.fault = error or InjectedFault("a test broke the engine")

    # --- what goes wrong ---

    def break_openings(self, count: int = 1) -> None:
        """The next openings after a fault raise, too."""
        self.broken_openings = count

    def fail_request(self, request_id: str, message: str = "a test made this request fail") -> None:
        """The request's next forward pass fails, for all that it asked for, and for nobody else's. It must live."""
        choices = [choice for request in self._requests.of(request_id) for choice in request.choices]
        live_ids = [choice.sequence_id for choice in choices if not choice.is_ended]
        assert live_ids, f"no request {request_id!r} lives: {[request.id for request in self._requests]} do"
        for sequence_id in live_ids:
            self.executor.errors[sequence_id] = message

    # --- what is left ---

    @property
    def first_unfinished_id(self) -> str | None:
        """Of those that are entered, in the queue or beyond it, one that has not had the end of its response; None:
        nobody."""
        return next((request.id for request in self._requests if not request.is_finished), None)
