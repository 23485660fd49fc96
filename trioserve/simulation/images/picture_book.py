"""What the reader of one picture may see: progress that grows, of the partial pictures that were wanted the newest, and
one end."""

from __future__ import annotations

from trioserve.contracts.events import FinishReason
from trioserve.contracts.image_generation import ImageDelta, Picture

__all__ = ["PictureBook"]


class PictureBook:
    """name: of the picture, in messages. pictures: what it is after each step that it is shown behind. last: what it is
    in the end. steps_done: so many its reader has been told of; -1: none. end: how it has ended; None: it has not."""

    def __init__(self, name: str, index: int, step_count: int, pictures: dict[int, Picture], last: Picture) -> None:
        self.name = name
        self.steps_done = -1
        self.end: FinishReason | None = None
        self._index = index
        self._step_count = step_count
        self._pictures = dict(pictures)
        self._last = last

    def take(self, delta: ImageDelta) -> None:
        """Asserts that it may come."""
        told = f"{self.name}: {_shown(delta)}"
        assert delta.index == self._index, f"{told} is of picture {delta.index}"
        assert self.end is None, f"{told} comes after its end"
        assert delta.step_count == self._step_count, f"{told}: {self._step_count} steps were asked for"
        self.end = delta.finish_reason
        if self.end is FinishReason.STOP:
            assert delta.steps_done == self._step_count, f"{told} is said to be done"
            assert delta.picture == self._last, f"{told} is another picture"
            return
        grows = delta.steps_done > self.steps_done or self.end is not None
        assert grows, f"{told} comes after {self.steps_done} steps were told of"
        self.steps_done = delta.steps_done
        if delta.picture is not None:
            shown = [step for step, picture in self._pictures.items() if picture == delta.picture]
            assert shown, f"{told} was not to be shown, or is shown again"
            assert self.end is None, f"{told} has not become what is shown"
            assert shown[0] <= delta.steps_done, f"{told} is what it is after {shown[0]} steps"
            self._pictures = {step: picture for step, picture in self._pictures.items() if step > shown[0]}
        if self.end is None:
            missed = [step for step in self._pictures if step <= delta.steps_done]
            assert not missed, f"{told}: what it was after {missed} steps was not shown"


def _shown(delta: ImageDelta) -> str:
    end = "" if delta.finish_reason is None else f" {delta.finish_reason.value}"
    return f"{delta.steps_done}{'' if delta.picture is None else '*'}{end}"
