"""Checks what the reader of one picture receives.

Progress grows, of the wanted partial pictures the newest is shown, and there is one end.
"""

from __future__ import annotations

from trioserve.contracts.events import FinishReason
from trioserve.contracts.image_generation import ImageDelta, RGBImage

__all__ = ["ImageBook"]


class ImageBook:
    """Expected deltas of one picture.

    Args:
        name: the picture's name in messages.
        index: the picture's index in its request.
        step_count: steps that were asked for.
        pictures: the picture after each step after which it is shown.
        last: the finished picture.

    Attributes:
        steps_done: steps in the latest delta, or -1 before the first.
        end: how the picture ended, or None before its end.
    """

    def __init__(self, name: str, index: int, step_count: int, pictures: dict[int, RGBImage], last: RGBImage) -> None:
        self.name = name
        self.steps_done = -1
        self.end: FinishReason | None = None
        self._index = index
        self._step_count = step_count
        self._images = dict(pictures)
        self._last = last

    def take(self, delta: ImageDelta) -> None:
        """Take a delta, and assert that it may come.

        Args:
            delta: the delta.
        """
        shown_delta = f"{self.name}: {_shown(delta)}"
        assert delta.index == self._index, f"{shown_delta} is of picture {delta.index}"
        assert self.end is None, f"{shown_delta} comes after its end"
        assert delta.step_count == self._step_count, f"{shown_delta}: {self._step_count} steps were asked for"
        self.end = delta.finish_reason
        if self.end is FinishReason.STOP:
            assert delta.steps_done == self._step_count, f"{shown_delta} is reported as finished"
            assert delta.image == self._last, f"{shown_delta} is another picture"
            return
        grows = delta.steps_done > self.steps_done or self.end is not None
        assert grows, f"{shown_delta} comes after {self.steps_done} steps were reported"
        self.steps_done = delta.steps_done
        if delta.image is not None:
            shown = [step for step, image in self._images.items() if image == delta.image]
            assert shown, f"{shown_delta} was not to be shown, or is shown again"
            assert self.end is None, f"{shown_delta} ends without success, and shows a picture"
            assert shown[0] <= delta.steps_done, f"{shown_delta} is what it is after {shown[0]} steps"
            self._images = {step: image for step, image in self._images.items() if step > shown[0]}
        if self.end is None:
            missed = [step for step in self._images if step <= delta.steps_done]
            assert not missed, f"{shown_delta}: the picture after steps {missed} was not shown"


def _shown(delta: ImageDelta) -> str:
    end = "" if delta.finish_reason is None else f" {delta.finish_reason.value}"
    return f"{delta.steps_done}{'' if delta.image is None else '*'}{end}"
