"""A step that was launched and may still run, and the tokens that the next step needs from it.

The scheduler may plan a step before the previous step has ended. Such a plan does not contain the tokens that the
previous step samples. The executor adds these tokens in the compute thread, right before it computes the planned step.
The event loop is not involved, because it may not yet have seen the previous step's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult

__all__ = ["BegunStep", "fill_awaited_tokens"]


class BegunStep:
    """A step that was begun. The first call of `result` computes the result or waits for it. Later calls return the
    stored result.

    Args:
        plan: chunks of the step.
        finish: computes the step or waits for its end. It is called once.
        chosen_rows: for a launched step, the row of each request's sampled token in a tensor on the device. None: a
            step that needs these tokens must wait for the result.
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
        """Return the result of the step, or None if the step was abandoned.

        Wait if another thread computes the step, otherwise compute the step here.
        """
        # `finish` refers to the previous step, which must be freed.
        finish, self._finish = self._finish, None
        if finish is not None:
            self._result = finish()
        return self._result

    def sampled_tokens(self) -> dict[RequestId, int]:
        """Wait for the step, and return the token that it sampled for each request."""
        result = self.result()
        if result is None:
            return {}
        return {
            chunk.request.id: token_id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is not None
        }

    def failed_requests(self) -> set[RequestId]:
        """Wait for the step, and return the requests without a result. They failed, or the step was abandoned."""
        result = self.result()
        if result is None:
            return {chunk.request.id for chunk in self.plan.chunks}
        return set(result.errors) | {
            chunk.request.id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is None and chunk.samples
        }


def fill_awaited_tokens(plan: StepPlan, before: BegunStep) -> list[tuple[int, ScheduledChunk]]:
    """Wait for the previous step, and add its sampled tokens to a plan that was made before that step ended.

    Requests that have no result in the previous step are skipped. They failed, or the previous step was abandoned, so
    their results are no longer needed.

    Args:
        plan: plan that lacks tokens of the previous step.
        before: previous step.

    Returns:
        Chunks that can be computed, each with its index in the plan.
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

    The list may grow while this object is used. It is not copied, because the list is long and most steps read only its
    last tokens.
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
        # Indexing a range also supports negative indexes, and raises IndexError for an index out of bounds.
        place = range(self._count + 1)[index]
        return self._last if place == self._count else self._tokens[place]
