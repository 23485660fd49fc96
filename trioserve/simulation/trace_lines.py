"""How what happens in a simulation looks in its trace: nothing in it differs from one process to the next."""

from __future__ import annotations

from trioserve.contracts.step import StepPlan
from trioserve.simulation.core.expected import ExpectedSequence

__all__ = ["abort_moment", "plan_line"]

_STEPS = ("between steps", "in a step", "in two steps")


def abort_moment(entry: ExpectedSequence | None) -> str:
    """When an abort comes, seen from its sequence; asked before the sequence takes note of it."""
    if entry is None:
        return "unknown id"
    if entry.finished is not None:
        return "too late"
    if entry.aborted_for is not None:
        return "repeated"
    return f"{_STEPS[entry.steps_in_flight]}, {entry.phase.value}"


def plan_line(plan: StepPlan | None) -> str:
    """Who lost its blocks (-r1), and who computes which tokens in which blocks; * samples, + draft tokens, ? awaits
    its token from the step before."""
    if plan is None:
        return "  nothing to compute"
    lost = [f"-{name}" for name in plan.preempted]
    chunks = [
        f"{chunk.request.id}[{chunk.start}:{chunk.start + chunk.count}]{'?' if chunk.awaits_token else ''}"
        f"{'*' if chunk.samples else ''}"
        f"{'+' + ','.join(map(str, chunk.draft)) if chunk.draft else ''}"
        f"@{','.join(map(str, chunk.block_table))}"
        for chunk in plan.chunks
    ]
    return f"  step {plan.step_index}{' ahead' if plan.is_ahead else ''}: {' '.join(lost + chunks)}"
