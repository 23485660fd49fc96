"""Control over an engine's steps: a test can run single steps, hold a forward pass open, or make it fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.ids import RequestId
from trioserve.engine.lifecycle.requests_by_id import RequestsById
from trioserve.engine.lifecycle.stepped_core import AnyPlan
from trioserve.testing.controlled_steps import ControlledSteps
from trioserve.testing.gated_core import GatedSteps

__all__ = ["InjectedFault", "SteppedByHand"]

STEPS_IN_FLIGHT_MAX = 2

PlanT = TypeVar("PlanT", bound=AnyPlan)


class InjectedFault(Exception):
    """A fault that a test injected into an engine or a request."""


class FailsRequests(Protocol):
    """An executor whose requests a test can make fail.

    Attributes:
        errors: requests that fail in their next forward pass, each with the error text.
    """

    errors: dict[RequestId, str]


class SteppedByHand(Generic[PlanT]):
    """Mixin that gives a test control over an engine's steps. It must be the first base class, before the engine.

    Attributes:
        core: the engine's core.
        steps: the engine's step runner.
        executor: the engine's executor.
        broken_openings: number of restarts that still fail.
    """

    core: GatedSteps
    steps: ControlledSteps[PlanT, Any]
    executor: FailsRequests
    broken_openings = 0
    wake: Any  # method of the engine
    _requests: RequestsById[Any]

    # --- steps ---

    def pause(self) -> None:
        """Begin no more steps. A step in flight continues."""
        self.core.is_paused = True

    def resume(self) -> None:
        """Let the engine step by itself again."""
        self.core.is_paused = False
        self.wake()

    async def step(self, count: int = 1) -> PlanT | None:
        """Run one or more steps: schedule, forward pass, aborts, update, deliver. The engine must be paused.

        Before and after each step, waits until all other tasks are idle.

        Args:
            count: number of steps.

        Returns:
            Plan of the last step, or None if there was nothing to compute.
        """
        assert self.core.is_paused, "the engine is not paused: call pause(), or open it with paused=True"
        plan = None
        for _ in range(count):
            plan = await self._begin_held_step()
            if plan is None:
                break
            await self._end_held_step()
        return plan

    async def finish_step(self) -> None:
        """Wait for the end of the steps in flight, so that the resources of requests that left are free.

        Before and after, waits until all other tasks are idle. Does not wait for a step that a test holds open.
        """
        await wait_all_tasks_blocked()
        for _ in range(STEPS_IN_FLIGHT_MAX):
            if self.steps.plan is None or self.steps.is_held:
                break
            await self.core.asked_again()
            await wait_all_tasks_blocked()

    @asynccontextmanager
    async def held_step(self) -> AsyncIterator[PlanT]:
        """Begin the next step, and hold its forward pass open inside of the `async with`.

        Inside, the step reads the blocks of its requests. At the end of the context the forward pass runs, and the step
        continues as in step(). If the engine is not paused, the held step is the next one that begins.

        Raises:
            AssertionError: no step begins, since no request waits or runs.
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
        """Begin a step and hold it. Return None, and hold nothing, if there is nothing to compute."""
        await wait_all_tasks_blocked()
        self.steps.hold()
        if self.core.is_paused:
            self.core.give_step()
        try:
            self.wake()
            await wait_all_tasks_blocked()
            while self.steps.plan is not None and not self.steps.is_held:  # A step that began before is still running.
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
        """Seconds of one forward pass, by the clock of the Trio program. A change takes effect at the next step."""
        return self.steps.seconds

    @step_seconds.setter
    def step_seconds(self, seconds: float) -> None:
        self.steps.seconds = seconds

    # --- faults ---

    def break_next_step(self, error: Exception | None = None) -> None:
        """Make the next forward pass raise. That is a fault of the engine, which ends the engine or restarts it.

        Args:
            error: the exception. Default: an InjectedFault.
        """
        self.steps.fault = error or InjectedFault("a test broke the engine")

    def break_openings(self, count: int = 1) -> None:
        """Make the next restarts of the engine fail.

        Args:
            count: number of restarts.
        """
        self.broken_openings = count

    def fail_request(self, request_id: str, message: str = "a test made this request fail") -> None:
        """Make the next forward pass of all sequences of a request fail. Other requests are not affected.

        Args:
            request_id: id of a request that has not ended.
            message: error text for the client.
        """
        choices = [choice for request in self._requests.of(request_id) for choice in request.choices]
        live_ids = [choice.sequence_id for choice in choices if not choice.is_ended]
        assert live_ids, f"no request {request_id!r} is open. Open: {[request.id for request in self._requests]}"
        for sequence_id in live_ids:
            self.executor.errors[sequence_id] = message

    # --- requests ---

    @property
    def first_unfinished_id(self) -> str | None:
        """Id of the first request whose response has not ended, also of a request that still waits in the queue. None:
        there is none.
        """
        return next((request.id for request in self._requests if not request.is_finished), None)
