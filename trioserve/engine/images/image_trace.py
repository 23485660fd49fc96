"""The life of a request for pictures as a span: its queue, its wait for a slot, its pictures, its end, and the moment
at which nothing of it is left. Names as in OpenTelemetry's conventions for generative AI, where they have one.
"""

from __future__ import annotations

from trioserve.contracts.tracing import Attributes
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.shell.request_trace import SpannedRequest

__all__ = ["OPERATION", "SpannedImage", "image_attributes"]

OPERATION = "generate_content"


class SpannedImage(SpannedRequest):
    """See SpannedRequest. A request for pictures has no tokens, and its first picture begins no stage."""

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
    """What is known of what is asked. Never the prompt: that is the caller's text."""
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
