"""What a step gives to the one that was planned before it had come back: the tokens that are awaited there.

The plan cannot name them, so the executor fills them in, in the compute thread, right before that step. Nothing of it
goes through the event loop, which need not even know by then that the step before is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult

__all__ = ["AwaitedTokens"]


class AwaitedTokens:
    """Remembers the last step, for the next one."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._result: StepResult | None = None

    def note(self, plan: StepPlan, result: StepResult | None) -> None:
        """A step is over; None: it was abandoned. Costs nothing."""
        self._plan, self._result = plan, result

    def fill_in(self, plan: StepPlan) -> list[tuple[int, ScheduledChunk]]:
        """The chunks of a plan that was made ahead of the last step's result, as if that had been known, each with its
        place in the plan. Left out are requests that were in the last step and have no result there: they failed, or
        the step was abandoned, and nobody waits for them."""
        given, missing = self._last_tokens()
        filled: list[tuple[int, ScheduledChunk]] = []
        for place, chunk in enumerate(plan.chunks):
            request_id = chunk.request.id
            if request_id in missing:
                continue
            if chunk.awaits_token:
                tokens = _TokensAndOne(chunk.tokens, chunk.start, given[request_id])
                chunk = ScheduledChunk(chunk.request, tokens, chunk.start, 1, chunk.block_table, True)
            filled.append((place, chunk))
        return filled

    def _last_tokens(self) -> tuple[dict[RequestId, int], set[RequestId]]:
        """What the last step sampled, and the requests that it has no result for."""
        plan, result = self._plan, self._result
        assert plan is not None, "a plan ahead of nothing"
        if result is None:
            return {}, {chunk.request.id for chunk in plan.chunks}
        given: dict[RequestId, int] = {}
        missing = set(result.errors)
        for chunk, token_id in zip(plan.chunks, result.token_ids, strict=True):
            if token_id is not None:
                given[chunk.request.id] = token_id
            elif chunk.samples:
                missing.add(chunk.request.id)
        return given, missing


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
