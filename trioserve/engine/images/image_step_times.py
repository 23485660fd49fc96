"""Where the time of each step of pictures went, and what it did."""

from __future__ import annotations

from trioserve.contracts.iterative import IterativePlan
from trioserve.engine.shell.step_times import PlanTimes, StepCounts

__all__ = ["ImageStepTimes"]


class ImageStepTimes(PlanTimes[IterativePlan]):
    """See PlanTimes."""

    def _counts(self, plan: IterativePlan) -> StepCounts:
        return StepCounts(len(plan.works), phase=plan.phase.value, work_count=plan.work_count)
