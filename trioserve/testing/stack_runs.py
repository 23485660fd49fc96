"""Plans for the stack, made to happen: from a seed, from a script, and again and again to cut a failing one down."""

from __future__ import annotations

from random import Random

from trioserve.testing.script import line_of
from trioserve.testing.shrink import Attempts, cut
from trioserve.testing.stack_plan import StackPlan, drawn_stack_plan, script_of, stack_plan_of
from trioserve.testing.stack_simulator import StackSimulation
from trioserve.testing.verdict import Failure, Trace, Verdict, failure_from, needs_assertions

__all__ = ["run_stack_script", "run_stack_seed", "shrunk_stack_failure"]


def run_stack_seed(seed: int, client_count: int, *, trace: Trace | None = None) -> Verdict:
    """Draw a plan with so many clients from a seed, and let it happen."""
    return _run(drawn_stack_plan(Random(seed), client_count), trace)


def run_stack_script(script: str, *, trace: Trace | None = None) -> Verdict:
    """Let a plan happen again."""
    return _run(stack_plan_of(script), trace)


def shrunk_stack_failure(failure: Failure, *, replays_max: int) -> Failure:
    """The plan with the fewest clients and orders that fails alike, of those that so many replays find."""
    plan = stack_plan_of(failure.script)

    def replay(candidate: StackPlan) -> Failure | None:
        return _run(candidate, None).failure

    attempts = Attempts(failure, replay, replays_max)
    if attempts.fails(plan):
        cut(plan.parts, lambda parts: attempts.fails(StackPlan(plan.stage, parts)))
    return attempts.plainest


def _run(plan: StackPlan, trace: Trace | None) -> Verdict:
    needs_assertions()
    simulation = StackSimulation(plan, trace=trace)
    if trace is not None:
        trace(line_of(plan.stage))
        for part in plan.parts:
            trace(line_of(part))
    try:
        simulation.run()
    except Exception as error:  # whatever it is, it is what is being looked for
        return Verdict(failure_from(error, script_of(plan)), simulation.counts, simulation.digest)
    return Verdict(None, simulation.counts, simulation.digest)
