"""Where the time of each step went, and what it computed: of the last 1,000 steps, and in all.

Written by the step loop, a line a step; whoever shows it reads it when it is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from trioserve.contracts.step import StepPlan
from trioserve.engine.shell.stepped_core import AnyPlan

__all__ = ["STEPS_MAX", "PlanTimes", "StepCounts", "StepTime", "StepTimes"]

STEPS_MAX = 1000  # half a minute of decoding on a CPU, some seconds on a GPU: enough to see what a step waits for


class StepTime(NamedTuple):
    """One step. Times are seconds of Trio's clock. Where steps overlap, it was planned while the one before was
    computed, and its forward pass begins when that one's ends.

    prefill_tokens: of prompts, and of what is computed again. decode_tokens: drafts included. is_dropped: nothing of it
    was delivered, since nobody waited for it any more. phase, work_count: of a step of pictures what it did, and how
    much; it has no tokens.
    """

    step_index: int
    schedule_at: float
    schedule_seconds: float
    forward_at: float
    forward_seconds: float
    update_seconds: float
    deliver_seconds: float
    sequence_count: int
    prefill_tokens: int
    decode_tokens: int
    admitted_count: int
    preempted_count: int
    is_ahead: bool
    is_dropped: bool
    phase: str = ""
    work_count: int = 0


class StepCounts(NamedTuple):
    """What a plan computes; see StepTime."""

    sequence_count: int
    prefill_tokens: int = 0
    decode_tokens: int = 0
    is_ahead: bool = False
    phase: str = ""
    work_count: int = 0


Plan = TypeVar("Plan", bound=AnyPlan)


class PlanTimes(ABC, Generic[Plan]):
    """count and the sums: of all steps so far, for whoever takes the difference of two looks."""

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=STEPS_MAX)
        self.count = 0
        self.schedule_seconds = 0.0
        self.forward_seconds = 0.0
        self.update_seconds = 0.0
        self.deliver_seconds = 0.0

    def latest(self) -> Iterable[StepTime]:
        """The last steps, the oldest first, as they stand now."""
        return tuple(self._steps)

    @abstractmethod
    def _counts(self, plan: Plan) -> StepCounts:
        """What it computes."""

    def note(
        self,
        plan: Plan,
        *,
        schedule_at: float,
        planned_at: float,
        forward_at: float,
        computed_at: float,
        updated_at: float,
        delivered_at: float,
        is_dropped: bool,
    ) -> None:
        """A step was delivered. The times are those at which one thing ended and the next began."""
        counts = self._counts(plan)
        step = StepTime(
            step_index=plan.step_index,
            schedule_at=schedule_at,
            schedule_seconds=planned_at - schedule_at,
            forward_at=forward_at,
            forward_seconds=computed_at - forward_at,
            update_seconds=updated_at - computed_at,
            deliver_seconds=delivered_at - updated_at,
            sequence_count=counts.sequence_count,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            admitted_count=len(plan.admitted),
            preempted_count=len(plan.preempted),
            is_ahead=counts.is_ahead,
            is_dropped=is_dropped,
            phase=counts.phase,
            work_count=counts.work_count,
        )
        self._steps.append(step)
        self.count += 1
        self.schedule_seconds += step.schedule_seconds
        self.forward_seconds += step.forward_seconds
        self.update_seconds += step.update_seconds
        self.deliver_seconds += step.deliver_seconds


class StepTimes(PlanTimes[StepPlan]):
    """Of an engine of texts."""

    def _counts(self, plan: StepPlan) -> StepCounts:
        decode_tokens = sum([chunk.row_count for chunk in plan.chunks if chunk.count == 1 and chunk.samples])
        return StepCounts(len(plan.chunks), plan.token_count - decode_tokens, decode_tokens, plan.is_ahead)
