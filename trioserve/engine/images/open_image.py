"""The engine's side of a request for pictures: what was asked, and each of its pictures, with how far its reader has
been told that it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.admission.local_endpoint import local_request
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.events import FinishReason, IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import ImageDelta, ImageParams, Picture
from trioserve.contracts.iterative import IterativeRequest
from trioserve.contracts.live import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.core.iterative.live_iteration import LiveIteration
from trioserve.core.request_state import RequestStatus
from trioserve.engine.images.image_preparation import WantedImage
from trioserve.engine.shell.request_scope import RequestPart, RequestScope

__all__ = ["ImageChoice", "OpenImage", "merge", "view_of"]


PHASES = tuple(IterativePhase)


class ImageChoice(RequestPart["OpenImage"]):
    """One of a request's n pictures. asked: what the core gets of it, once it is prepared. steps_done: as its reader
    was told. picture: once it is made; its end comes next."""

    __slots__ = ("asked", "first_shown_at", "picture", "steps_done")

    def __init__(self, request: OpenImage, index: int, sequence_id: RequestId) -> None:
        super().__init__(request, index, sequence_id)
        self.asked: IterativeRequest | None = None
        self.steps_done = 0
        self.picture: Picture | None = None
        self.first_shown_at: float | None = None  # when its first partial result came, or it was whole

    @property
    def progress(self) -> int:
        return self.steps_done


class OpenImage(RequestScope[ImageChoice, ImageDelta, IterativeRequest]):
    """For the meanings of what was asked see ImageEngine.generate_image. seed: of the first picture. wanted: what is
    made of prompt and params when it is entered."""

    wanted: WantedImage

    def __init__(
        self,
        prompt: str,
        params: ImageParams,
        *,
        seed: int,
        request_id: str,
        priority: int,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        part_of: Span = NO_SPAN,
    ) -> None:
        super().__init__(
            request_id=request_id,
            priority=priority,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            sequence_count=params.n,
            part_of=part_of,
        )
        self.prompt = prompt
        self.params = params
        self.seeds = tuple((seed + index) % 2**64 for index in range(params.n))

    def routed(self) -> RoutedRequest:
        return local_request((self.prompt,), tenant=self.tenant, priority=self.priority, sequences=self.sequence_count)

    def merged(self, pending: ImageDelta, delta: ImageDelta) -> ImageDelta:
        return merge(pending, delta)

    def delta(self, choice: ImageChoice, picture: Picture | None) -> ImageDelta:
        """How far a picture is now, and what it is by now."""
        return ImageDelta(
            index=choice.index, steps_done=choice.steps_done, step_count=self.wanted.step_count, picture=picture
        )

    def push_whole(self, choice: ImageChoice) -> None:
        """A picture is made: the last delta of it."""
        assert choice.picture is not None, f"{choice.sequence_id} ended without a picture"
        choice.is_ended = True
        self.push(
            ImageDelta(
                index=choice.index,
                steps_done=choice.steps_done,
                step_count=self.wanted.step_count,
                picture=choice.picture,
                finish_reason=FinishReason.STOP,
            )
        )
        choice.picture = None  # it is the reader's

    def push_end(
        self, choice: ImageChoice, reason: FinishReason, message: str | None = None, *, stop_reason: str | None = None
    ) -> None:
        choice.is_ended = True
        choice.picture = None
        self.push(
            ImageDelta(
                index=choice.index,
                steps_done=choice.steps_done,
                step_count=self.wanted.step_count,
                finish_reason=reason,
                message=message,
                stop_reason=stop_reason,
            )
        )


def merge(pending: ImageDelta, delta: ImageDelta) -> ImageDelta:
    """Two deltas of one picture that follow each other, as one. The later one says how far it is; a picture that was
    not read stays until there is a newer one, or an end."""
    if delta.picture is not None or delta.finish_reason is not None or pending.picture is None:
        return delta
    return msgspec.structs.replace(delta, picture=pending.picture)


def view_of(request: OpenImage, lives: Sequence[LiveIteration | None], now: float) -> LiveImageView:
    """Describe a request for images for status pages, from the engine's and the core's state.

    Args:
        lives: the core's state per image. None: the image has ended, or has not reached the core.
        now: seconds of Trio's clock.
    """
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
