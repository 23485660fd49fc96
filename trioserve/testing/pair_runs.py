"""Histories of a pair, made to happen: from a seed, from a script, and again and again to cut a failing one down."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from trioserve.testing.happen import happen
from trioserve.testing.pair_author import PairAuthor
from trioserve.testing.pair_history import PairEvent, PairHistory, history_of, script_of
from trioserve.testing.pair_simulator import PairSimulation
from trioserve.testing.shrink import shrunk_failure, with_defaults
from trioserve.testing.verdict import Failure, Trace, Verdict

__all__ = ["run_pair_script", "run_pair_seed", "shrunk_pair_failure"]


def run_pair_seed(seed: int, event_count: int, *, trace: Trace | None = None) -> Verdict:
    """Make up `event_count` events from a seed as they happen, then let everybody finish."""
    author = PairAuthor(Random(seed))
    simulation = PairSimulation(author.world, trace=trace)
    return _run(simulation, (author.next_event(simulation) for _ in range(event_count)), trace)


def run_pair_script(script: str, *, trace: Trace | None = None) -> Verdict:
    """Let a history happen again, and run to its end."""
    return _run_history(history_of(script), trace)


def shrunk_pair_failure(failure: Failure, *, replays_max: int) -> Failure:
    """The plainest failure of the same kind that so many replays find."""

    def replay(history: PairHistory) -> Failure | None:
        return _run_history(history, None).failure

    return shrunk_failure(failure, history_of(failure.script), replay, with_defaults, replays_max=replays_max)


def _run_history(history: PairHistory, trace: Trace | None) -> Verdict:
    return _run(PairSimulation(history.world, trace=trace), history.events, trace)


def _run(simulation: PairSimulation, events: Iterable[PairEvent], trace: Trace | None) -> Verdict:
    return happen(simulation, events, lambda happened: script_of(PairHistory(simulation.world, happened)), trace)
