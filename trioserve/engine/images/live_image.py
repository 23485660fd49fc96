"""A request for pictures as others may see it, put together from the engine's side of it and from what the core has."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.live import LiveImageView
from trioserve.core.iterative.live_iteration import LiveIteration
from trioserve.core.request_state import RequestStatus
from trioserve.engine.images.open_image import OpenImage

__all__ = ["view_of"]

PHASES = tuple(IterativePhase)


def view_of(request: OpenImage, lives: Sequence[LiveIteration | None], now: float) -> LiveImageView:
    """lives: those of the request's pictures, None for one that has ended or is not yet with the core."""
    living = [live for live in lives if live is not None]
    if request.is_finished:
        state = "finished"
    elif not living:
        state = "preparing"
    else:
        state = "running" if any(live.status is RequestStatus.RUNNING for live in living) else "waiting"
    if any(choice.is_ended and choice.has_run for choice in request.choices):
        phase = IterativePhase.DECODE
    else:
        phase = max((live.phase for live in living), key=PHASES.index, default=IterativePhase.QUEUED)
    return LiveImageView(
        id=request.id,
        state=state,
        phase=phase,
        priority=request.priority,
        age_seconds=now - request.entered_at,
        picture_count=request.sequence_count,
        steps_done=sum(choice.steps_done for choice in request.choices),
        step_count=request.wanted.step_count * request.sequence_count,
        slot_count=sum((live.slot is not None) + (live.kept_slot is not None) for live in living),
    )
