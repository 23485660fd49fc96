"""Begun step: what the next step can use of it before it has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import StepPlan, StepResult

__all__ = ["BegunStep"]


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
