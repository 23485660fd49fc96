"""A request as others may see it, put together from the engine's side of it and from what the core has of it."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.events import Phase
from trioserve.contracts.live import LiveRequestView
from trioserve.core.live_request import LiveRequest
from trioserve.core.request_state import RequestStatus
from trioserve.engine.open_request import OpenRequest

__all__ = ["view_of"]


def view_of(
    request: OpenRequest, sequences: Sequence[LiveRequest | None], now: float, *, held_block_count: int = 0
) -> LiveRequestView:
    """sequences: those of the request's choices, None for one that has ended or is not yet with the core.
    held_block_count: blocks of it that are held for another engine."""
    living = [live for live in sequences if live is not None]
    if request.is_finished:
        state = "held" if request.is_held else "finished"
    elif not living:
        state = "preparing"
    else:
        state = "running" if any(live.status is RequestStatus.RUNNING for live in living) else "waiting"
    if any(choice.first_token_at is not None for choice in request.choices):
        phase = Phase.DECODE
    else:
        phase = Phase.PREFILL if any(choice.has_run for choice in request.choices) else Phase.QUEUED
    return LiveRequestView(
        id=request.id,
        state=state,
        phase=phase,
        priority=request.priority,
        age_seconds=now - request.entered_at,
        prompt_token_count=request.prompt_token_count,
        completion_token_count=request.completion_token_count,
        block_count=sum(live.own_block_count for live in living) + held_block_count,
    )
