"""Surplus chunks of a step that was planned ahead: their requests ended or failed in the step before."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import ScheduledChunk, StepPlan, StepResult
from trioserve.core.live_request import LiveRequest

__all__ = ["lacking_ids", "without_ended"]


def without_ended(
    plan: StepPlan, result: StepResult, lives: Sequence[LiveRequest]
) -> tuple[tuple[ScheduledChunk, ...], tuple[int | None, ...]]:
    """Remove the chunks of ended requests from a plan that was made ahead.

    Args:
        plan: the plan.
        result: its result.
        lives: requests of the plan that have not ended, in its order.

    Returns:
        The remaining chunks, and the sampled token of each.
    """
    if len(lives) == len(plan.chunks):
        return plan.chunks, result.token_ids
    left_ids = {live.request.id for live in lives}
    indexes = [index for index, chunk in enumerate(plan.chunks) if chunk.request.id in left_ids]
    return tuple(plan.chunks[index] for index in indexes), tuple(result.token_ids[index] for index in indexes)


def lacking_ids(chunks: Sequence[ScheduledChunk], lives: Sequence[LiveRequest]) -> set[RequestId]:
    """Return the requests whose chunks must not count as computed.

    Either the tokens before the chunk were not computed, because the step before had no result for the request. Or the
    chunk's last token is unknown, because the request was aborted in that step.

    Args:
        chunks: chunks of a plan that was made ahead.
        lives: the request of each chunk.
    """
    lacking = set()
    for chunk, live in zip(chunks, lives, strict=True):
        if chunk.start != live.computed_count or chunk.start + chunk.count > len(live.tokens):
            lacking.add(chunk.request.id)
    return lacking
