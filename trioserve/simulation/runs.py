"""Runs simulations: from a seed, from a script, and repeatedly to reduce a failing one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from trioserve.simulation.script import (
    EventSimulation,
    Failure,
    Trace,
    Verdict,
    apply_events,
    failure_from,
    line_of,
    needs_assertions,
)
from trioserve.simulation.shrink import Attempts, cut, plainer_history, shrunk_failure, with_defaults

__all__ = ["Mode", "Runs", "runs_of"]

Mode = Literal["core", "stack", "router", "routers", "pair", "lasting", "ranks", "iterative", "images"]


class Runs(Protocol):
    """The functions of one kind of simulation."""

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        """Generate a simulation and run it to its end.

        Args:
            seed: seed of all random choices.
            size: number of events of a history, or of clients of a plan.
            trace: receives lines about the run. None: no trace.
        """

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        """Run a script to its end.

        Args:
            script: text of a history or a plan.
            trace: receives lines about the run. None: no trace.
        """

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        """Return the smallest failure of the same kind that was found.

        Args:
            failure: the failure.
            replays_max: maximum number of runs.
        """


def runs_of(mode: Mode) -> Runs:
    """Return the functions of a kind of simulation. Each kind imports only what it needs: the core is simulated without
    trio, HTTP and the router.

    Args:
        mode: the kind.
    """
    if mode == "stack":
        from trioserve.simulation.stack import plan as stack_plan
        from trioserve.simulation.stack import simulator as stack_simulator

        return _PlanRuns(
            drawn_plan=stack_plan.drawn_stack_plan,
            plan=stack_plan.StackPlan,
            plan_of=stack_plan.stack_plan_of,
            script_of=stack_plan.script_of,
            simulation=stack_simulator.StackSimulation,
        )
    if mode == "lasting":
        from trioserve.simulation.stored import plan as stored_plan
        from trioserve.simulation.stored import simulator as stored_simulator

        return _PlanRuns(
            drawn_plan=stored_plan.drawn_stored_plan,
            plan=stored_plan.StoredPlan,
            plan_of=stored_plan.stored_plan_of,
            script_of=stored_plan.script_of,
            simulation=stored_simulator.StoredSimulation,
        )
    if mode == "ranks":
        from trioserve.simulation.ranks import plan as ranks_plan
        from trioserve.simulation.ranks import simulator as ranks_simulator

        return _PlanRuns(
            drawn_plan=ranks_plan.drawn_ranks_plan,
            plan=ranks_plan.RanksPlan,
            plan_of=ranks_plan.ranks_plan_of,
            script_of=ranks_plan.script_of,
            simulation=ranks_simulator.RanksSimulation,
        )
    if mode == "images":
        from trioserve.simulation.images import plan as images_plan
        from trioserve.simulation.images import simulator as images_simulator

        return _PlanRuns(
            drawn_plan=images_plan.drawn_images_plan,
            plan=images_plan.ImagesPlan,
            plan_of=images_plan.images_plan_of,
            script_of=images_plan.script_of,
            simulation=images_simulator.ImagesSimulation,
        )
    if mode == "router":
        from trioserve.simulation.router import generator as router_generator
        from trioserve.simulation.router import history as router_history
        from trioserve.simulation.router import simulator as router_simulator

        return _EventRuns(
            generator=router_generator.RouterGenerator,
            simulation=router_simulator.RouterSimulation,
            history=router_history.RouterHistory,
            history_of=router_history.history_of,
            script_of=router_history.script_of,
            plainer=with_defaults,
        )
    if mode == "routers":
        from trioserve.simulation.router import routers_generator as routers_generator
        from trioserve.simulation.router import routers_history as routers_history
        from trioserve.simulation.router import routers_simulator as routers_simulator

        return _EventRuns(
            generator=routers_generator.RoutersGenerator,
            simulation=routers_simulator.RoutersSimulation,
            history=routers_history.RoutersHistory,
            history_of=routers_history.history_of,
            script_of=routers_history.script_of,
            plainer=with_defaults,
        )
    if mode == "pair":
        from trioserve.simulation.pair import generator as pair_generator
        from trioserve.simulation.pair import history as pair_history
        from trioserve.simulation.pair import simulator as pair_simulator

        return _EventRuns(
            generator=pair_generator.PairGenerator,
            simulation=pair_simulator.PairSimulation,
            history=pair_history.PairHistory,
            history_of=pair_history.history_of,
            script_of=pair_history.script_of,
            plainer=with_defaults,
        )
    if mode == "iterative":
        from trioserve.simulation.images import core_generator as iterative_generator
        from trioserve.simulation.images import core_history as iterative_history
        from trioserve.simulation.images import core_simulator as iterative_simulator

        return _EventRuns(
            generator=iterative_generator.IterativeGenerator,
            simulation=iterative_simulator.IterativeSimulation,
            history=iterative_history.IterativeHistory,
            history_of=iterative_history.history_of,
            script_of=iterative_history.script_of,
            plainer=with_defaults,
        )
    from trioserve.simulation.core import generator as core_generator
    from trioserve.simulation.core import history, simulator

    return _EventRuns(
        generator=core_generator.Generator,
        simulation=simulator.Simulation,
        history=history.History,
        history_of=history.history_of,
        script_of=history.script_of,
        plainer=plainer_history,
    )


class _Generator(Protocol):
    """Generates a world, and then one event after another, which may depend on the run so far."""

    @property
    def world(self) -> Any: ...

    def next_event(self, simulation: Any) -> Any: ...


class _EventRuns(NamedTuple):
    """Functions of a simulation that consists of a world and events, which together are a history."""

    generator: Callable[[Random], _Generator]
    simulation: Callable[..., EventSimulation]
    history: Callable[..., Any]
    history_of: Callable[[str], Any]
    script_of: Callable[[Any], str]
    plainer: Callable[..., Any]

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        generator = self.generator(Random(seed))
        simulation = self.simulation(generator.world, trace=trace)
        return self._run(simulation, (generator.next_event(simulation) for _ in range(size)), trace)

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        return self._run_history(self.history_of(script), trace)

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        def replay(history: Any) -> Failure | None:
            return self._run_history(history, None).failure

        return shrunk_failure(failure, self.history_of(failure.script), replay, self.plainer, replays_max=replays_max)

    def _run_history(self, history: Any, trace: Trace | None) -> Verdict:
        return self._run(self.simulation(history.world, trace=trace), history.events, trace)

    def _run(self, simulation: EventSimulation, events: Iterable[msgspec.Struct], trace: Trace | None) -> Verdict:
        def script_of(happened: tuple[Any, ...]) -> str:
            return self.script_of(self.history(simulation.world, happened))

        return apply_events(simulation, events, script_of, trace)


class _PlanRuns(NamedTuple):
    """Functions of a simulation with a plan, which is drawn before anything happens. A plan has a stage and parts."""

    drawn_plan: Callable[[Random, int], Any]
    plan: Callable[..., Any]
    plan_of: Callable[[str], Any]
    script_of: Callable[[Any], str]
    simulation: Callable[..., Any]

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        return self._run(self.drawn_plan(Random(seed), size), trace)

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        return self._run(self.plan_of(script), trace)

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        """Return the failure of the plan with the fewest parts that fails in the same way."""
        plan = self.plan_of(failure.script)

        def replay(candidate: Any) -> Failure | None:
            return self._run(candidate, None).failure

        attempts = Attempts(failure, replay, replays_max)
        if attempts.fails(plan):
            cut(plan.parts, lambda parts: attempts.fails(self.plan(plan.stage, parts)))
        return attempts.plainest

    def _run(self, plan: Any, trace: Trace | None) -> Verdict:
        needs_assertions()
        simulation = self.simulation(plan, trace=trace)
        if trace is not None:
            trace(line_of(plan.stage))
            for part in plan.parts:
                trace(line_of(part))
        try:
            simulation.run()
        except Exception as error:  # The simulation searches for errors of all kinds.
            return Verdict(failure_from(error, self.script_of(plan)), simulation.counts, simulation.digest)
        return Verdict(None, simulation.counts, simulation.digest)
