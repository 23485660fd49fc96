"""What a step that was planned ahead has computed for nothing: its requests ended, or failed, in the step before."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.core.live_request import LiveRequest

__all__ = ["lacking_ids", "without_ended"]


def without_ended(
    plan: StepPlan, result: StepResult, lives: Sequence[LiveRequest]
) -> tuple[tuple[ScheduledChunk, ...], tuple[int | None, ...]]:
    """Chunks and tokens of a plan that was made ahead, without those that are surplus. lives: who is left."""
    if len(lives) == len(plan.chunks):
        return plan.chunks, result.token_ids
    left_ids = {live.request.id for live in lives}
    indexes = [index for index, chunk in enumerate(plan.chunks) if chunk.request.id in left_ids]
    return tuple(plan.chunks[index] for index in indexes), tuple(result.token_ids[index] for index in indexes)


def lacking_ids(chunks: Sequence[ScheduledChunk], lives: Sequence[LiveRequest]) -> set[RequestId]:
    """Requests of a plan made ahead whose chunks count for nothing: what stands before them was not computed, since the
    step before had no result for them, or their token is not known, since they were aborted by then."""
    lacking = set()
    for chunk, live in zip(chunks, lives, strict=True):
        if chunk.start != live.computed_count or chunk.start + chunk.count > len(live.tokens):
            lacking.add(chunk.request.id)
    return lacking
