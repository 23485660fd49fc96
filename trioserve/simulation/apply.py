"""Applies events to a simulation one after another, to the end or to the first broken rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from trioserve.simulation.script import line_of
from trioserve.simulation.verdict import Trace, Verdict, failure_from, needs_assertions

__all__ = ["EventSimulation", "apply_events"]


class EventSimulation(Protocol):
    """A simulation that consists of a world and events.

    Attributes:
        counts: number of occurrences by name.
    """

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
    """Apply events, then run the simulation to its end.

    Args:
        simulation: the simulation.
        events: the events.
        script_of: writes applied events as a script that can be run again.
        trace: receives a line for each event. None: no trace.
    """
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
    except Exception as error:  # The simulation searches for errors of all kinds.
        return Verdict(failure_from(error, script_of(tuple(happened))), simulation.counts)
    return Verdict(None, simulation.counts)
