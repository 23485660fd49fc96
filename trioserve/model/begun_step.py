"""A step that was begun: what the next one, begun before it is over, can know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import StepPlan, StepResult

__all__ = ["BegunStep"]


class BegunStep:
    """Its result comes from whoever asks first, and stays.

    chosen_rows: of a step that was launched, by request the row in which its token stays on the device; None: whoever
    wants its tokens waits for the result."""

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
        """Waits, or computes. None: it was abandoned."""
        finish, self._finish = self._finish, None  # it knows the step before it, which is to be let go
        if finish is not None:
            self._result = finish()
        return self._result

    def given(self) -> dict[RequestId, int]:
        """What it sampled, by request."""
        result = self.result()
        if result is None:
            return {}
        return {
            chunk.request.id: token_id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is not None
        }

    def missing(self) -> set[RequestId]:
        """Requests that it has no result for: they failed, or it was abandoned."""
        result = self.result()
        if result is None:
            return {chunk.request.id for chunk in self.plan.chunks}
        return set(result.errors) | {
            chunk.request.id
            for chunk, token_id in zip(self.plan.chunks, result.token_ids, strict=True)
            if token_id is None and chunk.samples
        }
