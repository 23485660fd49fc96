"""Histories of a pair, made to happen: from a seed, from a script, and again and again to cut a failing one down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import TypeVar

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.testing.happen import happen
from trioserve.testing.pair_author import PairAuthor
from trioserve.testing.pair_history import PairEvent, PairHistory, PairWorld, history_of, script_of
from trioserve.testing.pair_simulator import PairSimulation
from trioserve.testing.shrink import Attempts, cut
from trioserve.testing.verdict import Failure, Trace, Verdict

__all__ = ["run_pair_script", "run_pair_seed", "shrunk_pair_failure"]

Part = TypeVar("Part", bound=msgspec.Struct)


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

    attempts = Attempts(failure, replay, replays_max)
    history = history_of(failure.script)
    if not attempts.fails(history):
        return failure  # it depends on something that is not in the history
    while True:
        before = history
        history = _fewer_events(history, attempts.fails)
        history = _plainer(history, attempts.fails)
        if history == before:
            return attempts.plainest


def _fewer_events(history: PairHistory, fails: Callable[[PairHistory], bool]) -> PairHistory:
    events = cut(history.events, lambda events: fails(PairHistory(history.world, events)))
    return PairHistory(history.world, events)


def _plainer(history: PairHistory, fails: Callable[[PairHistory], bool]) -> PairHistory:
    """The same settings and events, with as many defaults as still fail."""
    world, events = history.world, list(history.events)

    def world_fails(world: PairWorld) -> bool:
        return fails(PairHistory(world, tuple(events)))

    world = _with_defaults(world, world_fails)
    for index, event in enumerate(events):

        def event_fails(event: PairEvent, index: int = index) -> bool:
            return fails(PairHistory(world, (*events[:index], event, *events[index + 1 :])))

        events[index] = _with_defaults(event, event_fails)
    return PairHistory(world, tuple(events))


def _with_defaults(part: Part, fails: Callable[[Part], bool]) -> Part:
    for field in msgspec.structs.fields(part):
        if field.default is not msgspec.NODEFAULT and getattr(part, field.name) != field.default:
            try:
                plainer = msgspec.structs.replace(part, **{field.name: field.default})
            except StartupError:
                continue  # it does not go together with another setting
            if fails(plainer):
                part = plainer
    return part


def _run_history(history: PairHistory, trace: Trace | None) -> Verdict:
    return _run(PairSimulation(history.world, trace=trace), history.events, trace)


def _run(simulation: PairSimulation, events: Iterable[PairEvent], trace: Trace | None) -> Verdict:
    return happen(simulation, events, lambda happened: script_of(PairHistory(simulation.world, happened)), trace)
