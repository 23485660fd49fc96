"""Reduces a failing history to the events and values that are needed for the same failure.

First, events are removed by delta debugging (Zeller and Hildebrandt, 2002): in halves, then quarters, down to single
events. Then the remaining events are simplified: fewer choices, shorter prompts, no salt. The reduced history may fail
at another event, but only with the same error from the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.simulation.core.history import Abort, Arrive, Event, Fail, History, World
from trioserve.simulation.script import Failure

__all__ = ["Attempts", "cut", "plainer_history", "shrunk_failure", "with_defaults"]

PLAIN_ARRIVAL = Arrive(id="", prompt=(0,), output=1)
PLAIN_FIELDS = (
    "choices",
    "priority",
    "salt",
    "stops",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "temperature",
    "seed",
    "timeout",
    "remote",
    "is_sent",
    "guide",
)

Item = TypeVar("Item")
Case = TypeVar("Case")
Struct = TypeVar("Struct", bound=msgspec.Struct)
Eventful = TypeVar("Eventful", bound=msgspec.Struct)  # a struct with a world and events


class Attempts(Generic[Case]):
    """Runs cases, and checks if they fail in the same way.

    Args:
        failure: the failure to compare with.
        replay: runs a case, and returns its failure or None.
        replays_max: maximum number of runs.

    Attributes:
        plainest: failure of the last case that failed in the same way.
        left: number of further runs. If it is 0, no case counts as failing, so that the reduction ends.
    """

    def __init__(self, failure: Failure, replay: Callable[[Case], Failure | None], replays_max: int) -> None:
        self.plainest = failure
        self.left = replays_max
        self._replay = replay

    def fails(self, case: Case) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        failure = self._replay(case)
        if failure is None or not failure.is_like(self.plainest):
            return False
        self.plainest = failure
        return True


def cut(items: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return as few items as still fail, in their order.

    Args:
        items: the items.
        fails: returns True if items fail.
    """
    size = max(1, len(items) // 2)
    while True:
        begin, was_cut = 0, False
        while begin < len(items):
            candidate = items[:begin] + items[begin + size :]
            if fails(candidate):
                items, was_cut = candidate, True
            else:
                begin += size
        if size > 1:
            size //= 2
        elif not was_cut:
            return items


def shrunk_failure(
    failure: Failure,
    history: Eventful,
    replay: Callable[[Eventful], Failure | None],
    plainer: Callable[[Eventful, Callable[[Eventful], bool]], Eventful],
    *,
    replays_max: int,
) -> Failure:
    """Return the smallest failure of the same kind that was found.

    Args:
        failure: the failure.
        history: the history that failed.
        replay: runs a history, and returns its failure or None.
        plainer: simplifies a history with a function that says if a history fails. It returns a failing history with as
            many events.
        replays_max: maximum number of runs.
    """
    attempts = Attempts(failure, replay, replays_max)
    if not attempts.fails(history):
        return failure  # The failure depends on something outside of the history.
    while True:
        before = history
        history = _fewer_events(history, attempts.fails)
        history = plainer(history, attempts.fails)
        if history == before:
            return attempts.plainest


def _fewer_events(history: Eventful, fails: Callable[[Eventful], bool]) -> Eventful:
    fewer: Any = history
    events = cut(fewer.events, lambda events: fails(msgspec.structs.replace(history, events=events)))
    return msgspec.structs.replace(history, events=events)


def with_defaults(history: Eventful, fails: Callable[[Eventful], bool]) -> Eventful:
    """Return the same history with as many default values of fields as still fail.

    Args:
        history: the failing history.
        fails: returns True if a history fails.
    """
    whole: Any = history
    world, events = whole.world, list(whole.events)

    def world_fails(world: msgspec.Struct) -> bool:
        return fails(msgspec.structs.replace(history, world=world))

    history = msgspec.structs.replace(history, world=_with_defaults(world, world_fails))
    for index, event in enumerate(events):

        def event_fails(event: msgspec.Struct, index: int = index) -> bool:
            return fails(msgspec.structs.replace(history, events=(*events[:index], event, *events[index + 1 :])))

        events[index] = _with_defaults(event, event_fails)
    return msgspec.structs.replace(history, events=tuple(events))


def _with_defaults(part: Struct, fails: Callable[[Struct], bool]) -> Struct:
    for field in msgspec.structs.fields(part):
        if field.default is not msgspec.NODEFAULT and getattr(part, field.name) != field.default:
            try:
                plainer = msgspec.structs.replace(part, **{field.name: field.default})
            except StartupError:
                continue  # The default contradicts another setting.
            if fails(plainer):
                part = plainer
    return part


def plainer_history(history: History, fails: Callable[[History], bool]) -> History:
    """Return the same history with each event as simple as possible, as long as it fails.

    Args:
        history: the failing history.
        fails: returns True if a history fails.
    """
    for world in _plainer_worlds(history.world):
        candidate = History(world, history.events)
        if fails(candidate):
            history = candidate
    index = 0
    while index < len(history.events):
        events = history.events
        for event in _plainer(events[index]):
            candidate = History(history.world, (*events[:index], event, *events[index + 1 :]))
            if fails(candidate):
                history = candidate
                break
        else:
            index += 1
    return history


def _plainer_worlds(world: World) -> Iterator[World]:
    if world.has_poor_hash:
        yield msgspec.structs.replace(world, has_poor_hash=False)
    if world.overlaps:
        yield msgspec.structs.replace(world, overlaps=False, apart=False)
    if world.apart:
        yield msgspec.structs.replace(world, apart=False)
    if world.draft_tokens:
        yield msgspec.structs.replace(world, draft_tokens=0, drafts_by_model=False, drafts_by_head=False)
    if world.drafts_by_model:
        yield msgspec.structs.replace(world, drafts_by_model=False, drafts_by_head=False)
    if world.enable_prefix_caching:
        yield msgspec.structs.replace(world, enable_prefix_caching=False)


def _plainer(event: Event) -> Iterator[Event]:
    if isinstance(event, Arrive):
        for name in PLAIN_FIELDS:
            if getattr(event, name) != getattr(PLAIN_ARRIVAL, name):
                yield msgspec.structs.replace(event, **{name: getattr(PLAIN_ARRIVAL, name)})
        for output in dict.fromkeys((1, event.output // 2, event.output - 1)):
            if 1 <= output < event.output:
                yield msgspec.structs.replace(event, output=output)
        for prompt in _shorter(event.prompt):
            yield msgspec.structs.replace(event, prompt=prompt)
    elif isinstance(event, Abort | Fail):
        for index in range(len(event.ids) if len(event.ids) > 1 else 0):
            yield msgspec.structs.replace(event, ids=(*event.ids[:index], *event.ids[index + 1 :]))


def _shorter(prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if len(prompt) > 1:
        yield tuple(prompt[: len(prompt) // 2])
        yield tuple(prompt[:-1])
    if any(prompt):
        yield (0,) * len(prompt)
