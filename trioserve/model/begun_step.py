"""Begun step: what the next step can use of it before it has ended.

A plan that was made before the result of the previous step was known cannot name its tokens. The executor fills them
in, in the compute thread, right before the step. The event loop takes no part: it may not even know yet that the
previous step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult

__all__ = ["BegunStep", "fill_awaited_tokens"]


class BegunStep:
    """A step that was begun. The first caller of `result` computes the result or waits for it, and later callers get it
    again.

    Args:
        plan: chunks of the step.
        finish: computes the step or waits for it. It is called once.
        chosen_rows: for a launched step, the row in which each request's token stays on the device. None: a step that
            needs its tokens must wait for the result.
    """

    __slots__ = ("_finish", "_result", "chosen_rows", "plan")

    def __init__(
        self,
        plan: StepPlan,
        finish: Callable[[], StepResult | None],
        chosen_rows: Mapping[RequestId, int] | None = None,
    ) -> None:
        self.plan = plan
        self.chosen_rows = chosen_rows
        self._finish: Callable[[], StepResult | None] | None = finish
        self._result: StepResult | None = None

    def result(self) -> StepResult | None:
        """Wait for the step, or compute it. Return None if it was abandoned."""
        finish, self._finish = self._finish, None  # `finish` refers to the step before it, which must be freed
        if finish is not None:
            self._result = finish()
        return self._result

    def sampled_tokens(self) -> dict[RequestId, int]:
        """Wait for the step, and return its sampled tokens by request."""
        result = self.result()
        if result is None:
            return {}
        return {
            chunk.request.id: token_id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is not None
        }

    def failed_requests(self) -> set[RequestId]:
        """Wait for the step, and return requests without a result: they failed, or the step was abandoned."""
        result = self.result()
        if result is None:
            return {chunk.request.id for chunk in self.plan.chunks}
        return set(result.errors) | {
            chunk.request.id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is None and chunk.samples
        }


def fill_awaited_tokens(plan: StepPlan, before: BegunStep) -> list[tuple[int, ScheduledChunk]]:
    """Wait for the previous step, and fill its tokens into a plan that was made ahead of it.

    Requests of the previous step without a result are left out: they failed, or that step was abandoned, and their
    results are no longer needed.

    Args:
        plan: plan that awaits tokens.
        before: previous step.

    Returns:
        Index in the plan and chunk, for each chunk that can be computed.
    """
    sampled, failed = before.sampled_tokens(), before.failed_requests()
    filled: list[tuple[int, ScheduledChunk]] = []
    for place, chunk in enumerate(plan.chunks):
        request_id = chunk.request.id
        if request_id in failed:
            continue
        if chunk.awaits_token:
            tokens = _TokensAndOne(chunk.tokens, chunk.start, sampled[request_id])
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
    """The first `count` tokens of a list, and one more token.

    The list may grow meanwhile. It is not copied, because it is long and most steps read only its end.
    """

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
        place = range(self._count + 1)[index]  # also counts from the end, and raises IndexError
        return self._last if place == self._count else self._tokens[place]
