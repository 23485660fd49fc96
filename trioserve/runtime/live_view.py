"""A request as others may see it, put together from its stream and from what the core has of it."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.events import Phase
from trioserve.contracts.live import LiveRequestView
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.runtime.request_stream import RequestStream

__all__ = ["view_of"]


def view_of(
    stream: RequestStream, sequences: Sequence[LiveRequest | None], now: float, *, held_block_count: int = 0
) -> LiveRequestView:
    """sequences: those of the stream's choices, None for one that has ended or is not yet with the core.
    held_block_count: blocks of it that are held for another engine."""
    living = [live for live in sequences if live is not None]
    if stream.is_finished:
        state = "held" if stream.is_held else "finished"
    elif not living:
        state = "preparing"
    else:
        state = "running" if any(live.status is RequestStatus.RUNNING for live in living) else "waiting"
    if any(choice.first_token_at is not None for choice in stream.choices):
        phase = Phase.DECODE
    else:
        phase = Phase.PREFILL if any(choice.has_run for choice in stream.choices) else Phase.QUEUED
    return LiveRequestView(
        id=stream.id,
        state=state,
        phase=phase,
        priority=stream.priority,
        age_seconds=now - stream.entered_at,
        prompt_token_count=len(stream.prompt_token_ids),
        completion_token_count=stream.completion_token_count,
        block_count=sum(len(live.blocks) for live in living) + held_block_count,
    )
