"""The engine's state of a request for images: its options, and the progress that its reader has received."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.admission.local_endpoint import local_request
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.events import FinishReason, IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import ImageDelta, ImageParams, IterativeRequest, RGBImage
from trioserve.contracts.page import LiveImageView
from trioserve.contracts.tracing import NO_SPAN, Attributes, Span
from trioserve.core.iterative.engine import LiveIteration
from trioserve.core.request_state import RequestStatus
from trioserve.engine.images.image_preparation import WantedImage
from trioserve.engine.lifecycle.request_scope import RequestPart, RequestScope
from trioserve.engine.lifecycle.request_trace import SpannedRequest

__all__ = ["ImageChoice", "OpenImage", "merge", "view_of", "OPERATION", "SpannedImage", "image_attributes"]


PHASES = tuple(IterativePhase)


class ImageChoice(RequestPart["OpenImage"]):
    """One of a request's n images.

    Args:
        request: the request.
        index: index of the image.
        sequence_id: id of the image in the core.

    Attributes:
        asked: the core's request for the image. None until the request is prepared.
        steps_done: denoising steps whose progress was delivered.
        image: the complete image. It is set shortly before the image ends.
        first_shown_at: time at which the first partial or complete image was delivered. None: none was delivered yet.
    """

    __slots__ = ("asked", "first_shown_at", "image", "steps_done")

    def __init__(self, request: OpenImage, index: int, sequence_id: RequestId) -> None:
        super().__init__(request, index, sequence_id)
        self.asked: IterativeRequest | None = None
        self.steps_done = 0
        self.image: RGBImage | None = None
        self.first_shown_at: float | None = None

    @property
    def progress(self) -> int:
        return self.steps_done


class OpenImage(RequestScope[ImageChoice, ImageDelta, IterativeRequest]):
    """A request for images. `ImageEngine.generate_image` documents the options.

    Args:
        prompt: the prompt.
        params: options of the images.
        seed: seed of the first image.
        request_id: the caller's id.
        priority: a lower number runs sooner.
        deadlines: deadlines of the request.
        owner: user who may see and abort the request. None: not restricted.
        tenant: the queue is fair between tenants.
        part_of: parent span of the request's trace.

    Attributes:
        wanted: description of the images. It is derived from `prompt` and `params` when the request is entered.
    """

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
            merge=merge,
            part_of=part_of,
        )
        # Another server can resume the request, because the same prompt and seed give the same images.
        self.is_resumable = True
        self.prompt = prompt
        self.params = params
        self.seeds = tuple((seed + index) % 2**64 for index in range(params.n))

    def routed(self) -> RoutedRequest:
        return local_request((self.prompt,), tenant=self.tenant, priority=self.priority, sequences=self.sequence_count)

    def delta(self, choice: ImageChoice, image: RGBImage | None) -> ImageDelta:
        """Make a delta with the progress of an image.

        Args:
            choice: the image.
            image: a partial result. None: the delta has no image.
        """
        return ImageDelta(
            index=choice.index, steps_done=choice.steps_done, step_count=self.wanted.step_count, image=image
        )

    def push_whole(self, choice: ImageChoice) -> None:
        """Push the last delta of an image, with the complete image.

        Args:
            choice: the image.
        """
        assert choice.image is not None, f"{choice.sequence_id} ended without an image"
        choice.is_ended = True
        self.push(
            ImageDelta(
                index=choice.index,
                steps_done=choice.steps_done,
                step_count=self.wanted.step_count,
                image=choice.image,
                finish_reason=FinishReason.STOP,
            )
        )
        choice.image = None  # Free the memory here, because only the reader needs the image now.

    def push_end(
        self, choice: ImageChoice, reason: FinishReason, message: str | None = None, *, stop_reason: str | None = None
    ) -> None:
        choice.is_ended = True
        choice.image = None
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
    """Merge two consecutive unread deltas of one image.

    The result has the progress of the newer delta. An unread image is kept, unless the newer delta has an image or
    is the last one.

    Args:
        pending: the older delta.
        delta: the newer delta.
    """
    if delta.image is not None or delta.finish_reason is not None or pending.image is None:
        return delta
    return msgspec.structs.replace(delta, image=pending.image)


def view_of(request: OpenImage, lives: Sequence[LiveIteration | None], now: float) -> LiveImageView:
    """Describe a request for images for status pages, from the state in the engine and in the core.

    Args:
        request: the request.
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
        image_count=request.sequence_count,
        steps_done=sum(choice.steps_done for choice in request.choices),
        step_count=request.wanted.step_count * request.sequence_count,
        slot_count=sum((live.slot is not None) + (live.kept_slot is not None) for live in living),
    )


OPERATION = "generate_content"


class SpannedImage(SpannedRequest):
    """Records the events of a request for images in a span. Images have no tokens, so the first image begins no new
    stage.
    """

    __slots__ = ()

    def leased(self) -> None:
        self._begin("wait")

    def runs(self) -> None:
        if not self._has_run:
            self._has_run = True
            self._begin("denoise")

    def first_token(self) -> None:
        if not self._has_token:
            self._has_token = True
            self._span.event("first_picture")

    def left(self, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self._is_left = True
        self._span.note({"gen_ai.response.finish_reasons": self._reasons})
        self._end_if_over()


def image_attributes(request: OpenImage) -> Attributes:
    """Return the options of a request as trace attributes. The prompt is never included, because it is the caller's
    text.

    Args:
        request: the request.
    """
    task = request.wanted.task
    return {
        "gen_ai.output.type": "image",
        "gen_ai.request.choice.count": request.sequence_count,
        "trioserve.image.width": task.width,
        "trioserve.image.height": task.height,
        "trioserve.image.steps": request.wanted.step_count,
        "trioserve.image.guidance": task.guidance,
        "trioserve.image.sampler": task.sampler,
    }
