"""What a task holds of a request for pictures: await it for all of them, or enter it and leave to abort."""

from __future__ import annotations

from collections.abc import AsyncIterable, Generator
from typing import Any

from trioserve.contracts.image_generation import ImageDelta, Picture
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.shell.error_of_end import error_of
from trioserve.engine.shell.scope_stream import ScopeStream
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageStream", "pictures_of"]


@uninterrupted
class ImageStream(ScopeStream[OpenImage, ImageDelta]):
    """`pictures = await engine.generate_image("a cat")`; or, for a look at them meanwhile,
    `async with engine.generate_image("a cat") as stream: async for delta in stream: ...`. See ScopeStream.

    A reader that is slow finds one delta for each picture: the newest. The last one of each is never lost.
    """

    def __await__(self) -> Generator[Any, Any, tuple[Picture, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[Picture, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[Picture, ...]:
        """All that were asked for, in their order, when each is made. Raises RequestFailed, RequestAborted or
        DeadlinePassed for the first one that is not, and EngineFault."""
        return await pictures_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of each picture."""
        return self._request.seeds

    @property
    def step_count(self) -> int:
        """Denoising steps of each picture; known once it is entered."""
        return self._request.wanted.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each picture; known once it is entered."""
        task = self._request.wanted.task
        return task.width, task.height


async def pictures_of(deltas: AsyncIterable[ImageDelta]) -> tuple[Picture, ...]:
    """See ImageStream.pictures."""
    made: dict[int, Picture] = {}
    async for delta in deltas:
        if (error := error_of(delta)) is not None:
            raise error
        if delta.finish_reason is not None:
            assert delta.picture is not None, "a picture is made, and is not there"
            made[delta.index] = delta.picture
    return tuple(made[index] for index in sorted(made))
