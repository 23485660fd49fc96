"""Cuts a failing history down to what it takes to fail in the same way.

First events go, by delta debugging (Zeller and Hildebrandt, 2002): in halves, then quarters, down to single ones. Then
what is left is made plainer: fewer choices, shorter prompts, no salt. What shrinks may fail at another event, but only
with the same error from the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.simulation.core.history import Abort, Arrive, Event, Fail, History, World
from trioserve.simulation.verdict import Failure

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
Eventful = TypeVar("Eventful", bound=msgspec.Struct)  # has a world and events


class Attempts(Generic[Case]):
    """Lets cases happen and tells whether they fail alike. plainest: the failure of the last that did. left: how many
    more may be tried; after that nothing fails any more, so that whoever asks comes to an end."""

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
    """As few of the items, in their order, as still fail."""
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
    """The plainest failure of the same kind that so many replays find, beginning with the history that failed. plainer
    gets a history and what tells whether one fails, and returns one that does and has as many events."""
    attempts = Attempts(failure, replay, replays_max)
    if not attempts.fails(history):
        return failure  # it depends on something that is not in the history
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
    """The same world and events, with as many defaults of their fields as still fail."""
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
                continue  # it does not go together with another setting
            if fails(plainer):
                part = plainer
    return part


def plainer_history(history: History, fails: Callable[[History], bool]) -> History:
    """The same events, each as plain as it can be and still fail."""
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
