"""The life of a request for images as a trace span, with a child span per stage: queue, wait, denoise.

Names follow OpenTelemetry's conventions for generative AI where these define a name.
"""

from __future__ import annotations

from trioserve.contracts.tracing import Attributes
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.lifecycle.request_trace import SpannedRequest

__all__ = ["OPERATION", "SpannedImage", "image_attributes"]

OPERATION = "generate_content"


class SpannedImage(SpannedRequest):
    """Records the events of a request for images. It has no tokens, and its first image begins no new stage."""

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
