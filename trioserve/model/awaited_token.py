"""A plan that was made before the step before it had come back, with the tokens that it awaits filled in.

The plan cannot name them, so the executor fills them in, in the compute thread, right before that step. Nothing of it
goes through the event loop, which need not even know by then that the step before is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.model.begun_step import BegunStep

__all__ = ["fill_in"]


def fill_in(plan: StepPlan, before: BegunStep) -> list[tuple[int, ScheduledChunk]]:
    """The chunks of a plan that was made ahead of the last step's result, as if that had been known, each with its
    place in the plan; waits for that result. Left out are requests that were in the last step and have no result there:
    they failed, or the step was abandoned, and nobody waits for them."""
    given, missing = before.given(), before.missing()
    filled: list[tuple[int, ScheduledChunk]] = []
    for place, chunk in enumerate(plan.chunks):
        request_id = chunk.request.id
        if request_id in missing:
            continue
        if chunk.awaits_token:
            tokens = _TokensAndOne(chunk.tokens, chunk.start, given[request_id])
            chunk = ScheduledChunk(
                chunk.request,
                tokens,
                chunk.start,
                1,
                chunk.block_table,
                True,
                mask_row=chunk.mask_row,
                states=chunk.states,
            )
        filled.append((place, chunk))
    return filled


class _TokensAndOne(Sequence[int]):
    """The first `count` of some tokens, and one more. The list may grow meanwhile; it is not copied, since it is long
    and most steps look at its end alone."""

    __slots__ = ("_count", "_last", "_tokens")

    def __init__(self, tokens: Sequence[int], count: int, last: int) -> None:
        self._tokens = tokens
        self._count = count
        self._last = last

    def __len__(self) -> int:
        return self._count + 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            begin, end, stride = index.indices(self._count + 1)
            if stride != 1:
                return [self[place] for place in range(begin, end, stride)]
            known = self._tokens[begin : min(end, self._count)]
            return [*known, self._last] if begin <= self._count < end else known
        place = range(self._count + 1)[index]  # from the end, too; raises IndexError
        return self._last if place == self._count else self._tokens[place]
