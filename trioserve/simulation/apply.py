"""Lets events happen to a simulation one after another, to the end or to the first that breaks a promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from trioserve.simulation.script import line_of
from trioserve.simulation.verdict import Trace, Verdict, failure_from, needs_assertions

__all__ = ["EventSimulation", "apply_events"]


class EventSimulation(Protocol):
    """world: what is given from the beginning. counts: of what came to pass."""

    counts: dict[str, int]

    @property
    def world(self) -> msgspec.Struct: ...

    def apply(self, event: Any) -> None: ...

    def run_to_end(self) -> None: ...


def apply_events(
    simulation: EventSimulation,
    events: Iterable[msgspec.Struct],
    script_of: Callable[[tuple[Any, ...]], str],
    trace: Trace | None,
) -> Verdict:
    """script_of: writes the events that have happened, so that they can happen again."""
    needs_assertions()
    happened: list[msgspec.Struct] = []
    if trace is not None:
        trace(line_of(simulation.world))
    try:
        for event in events:
            happened.append(event)
            if trace is not None:
                trace(line_of(event))
            simulation.apply(event)
        if trace is not None:
            trace("# to the end")
        simulation.run_to_end()
    except Exception as error:  # whatever it is, it is what is being looked for
        return Verdict(failure_from(error, script_of(tuple(happened))), simulation.counts)
    return Verdict(None, simulation.counts)
