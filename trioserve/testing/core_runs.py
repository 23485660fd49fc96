"""Histories of the core, made to happen: from a seed, from a script, and again and again to cut a failing one down."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from trioserve.testing.author import Author
from trioserve.testing.happen import happen
from trioserve.testing.history import Event, History, history_of, script_of
from trioserve.testing.shrink import plainer_history, shrunk_failure
from trioserve.testing.simulator import Simulation
from trioserve.testing.verdict import Failure, Trace, Verdict

__all__ = ["run_core_script", "run_core_seed", "shrunk_core_failure"]


def run_core_seed(seed: int, event_count: int, *, trace: Trace | None = None) -> Verdict:
    """Make up `event_count` events from a seed as they happen, then let it run to its end."""
    author = Author(Random(seed))
    simulation = Simulation(author.world, trace=trace)
    return _run(simulation, (author.next_event(simulation) for _ in range(event_count)), trace)


def run_core_script(script: str, *, trace: Trace | None = None) -> Verdict:
    """Let a history happen again, and run to its end."""
    return _run_history(history_of(script), trace)


def shrunk_core_failure(failure: Failure, *, replays_max: int) -> Failure:
    """The plainest failure of the same kind that so many replays find."""

    def replay(history: History) -> Failure | None:
        return _run_history(history, None).failure

    return shrunk_failure(failure, history_of(failure.script), replay, plainer_history, replays_max=replays_max)


def _run_history(history: History, trace: Trace | None) -> Verdict:
    return _run(Simulation(history.world, trace=trace), history.events, trace)


def _run(simulation: Simulation, events: Iterable[Event], trace: Trace | None) -> Verdict:
    return happen(simulation, events, lambda happened: script_of(History(simulation.world, happened)), trace)
