"""Generates histories of iterative requests.

It sees which requests are live and which step is in flight, but no internal state of the core.
"""

from __future__ import annotations

from random import Random

from trioserve.contracts.events import FinishReason
from trioserve.simulation.images.core_history import (
    Abort,
    Arrive,
    Begin,
    Fail,
    Forward,
    IterativeSimulationEvent,
    IterativeWorld,
    Update,
)
from trioserve.simulation.images.core_simulator import IterativeSimulation

__all__ = ["IterativeGenerator"]

STEPS_MAX = 6
INVALID_SHARE = 0.03


class IterativeGenerator:
    """Generates one history.

    Args:
        rng: source of all random choices, used in the order of the calls.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.world = IterativeWorld(slots=rng.randint(1, 5), kept=rng.choice((0, 1, 1, 2, 4)), work=rng.randint(2, 9))
        wildness = rng.random()
        self._abort_chance = rng.choice((0.0, 0.05, 0.2)) * wildness
        self._fail_chance = rng.choice((0.0, 0.0, 0.05)) * wildness
        self._arrival_chance = rng.choice((0.1, 0.25, 0.4))
        self._live_max = rng.choice((3, 6, 12))
        self._priorities = rng.choice(((0,), (0, 0, -1), (-1, 0, 1)))
        self._cost_max = rng.choice((1, 2, self.world.work))
        self._arrivals = 0

    def next_event(self, simulation: IterativeSimulation) -> IterativeSimulationEvent:
        rng = self._rng
        if len(simulation.live) < self._live_max and rng.random() < self._arrival_chance:
            return self._arrive()
        if rng.random() < self._abort_chance and simulation.entries:
            return self._abort(simulation)
        plan = simulation.plan
        if plan is None:
            return Begin()
        if simulation.is_computed:
            return Update()
        if rng.random() < self._fail_chance:
            return Fail(ids=(rng.choice(plan.works).request.id,))
        return Forward()

    def _arrive(self) -> Arrive:
        rng, world = self._rng, self.world
        self._arrivals += 1
        is_valid = rng.random() >= INVALID_SHARE
        cost_max = min(self._cost_max, world.work) if is_valid else world.work + 1
        denoise = rng.randint(1, cost_max)
        return Arrive(
            id=f"r{self._arrivals}",
            steps=rng.randint(1 if is_valid else 0, STEPS_MAX),
            seed=rng.getrandbits(16),
            priority=rng.choice(self._priorities),
            guided=rng.random() < 0.4 and (2 * denoise <= world.work or not is_valid),
            encode=rng.randint(1, cost_max),
            denoise=denoise,
            decode=rng.randint(1, cost_max),
            partial_every=rng.choice((None, None, 1, 2, 3)),
        )

    def _abort(self, simulation: IterativeSimulation) -> Abort:
        rng = self._rng
        # Mostly a live request, now and then all requests of the step, and sometimes an unknown id.
        names: list[str] = list(simulation.live) if rng.random() < 0.8 else list(simulation.entries)
        if simulation.plan is not None and rng.random() < 0.3:
            names = [work.request.id for work in simulation.plan.works]
        elif not names or rng.random() < 0.05:
            names = [f"r{self._arrivals}0"]
        else:
            names = [rng.choice(names) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        reason = rng.choice((FinishReason.ABORT, FinishReason.ABORT, FinishReason.DEADLINE))
        return Abort(ids=tuple(names), reason=reason)
