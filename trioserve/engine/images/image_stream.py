"""The caller's side of a request for images: await it for all images, or enter it, and leave it to abort."""

from __future__ import annotations

from collections.abc import AsyncIterable, Generator
from typing import Any

from trioserve.contracts.image_generation import ImageDelta, RGBImage
from trioserve.engine.images.open_image import OpenImage
from trioserve.engine.lifecycle.error_of_end import error_of
from trioserve.engine.lifecycle.scope_stream import ScopeStream
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ImageStream", "images_of"]


@uninterrupted
class ImageStream(ScopeStream[OpenImage, ImageDelta]):
    """The images of a request: `pictures = await engine.generate_image("a cat")`.

    To see partial results: `async with engine.generate_image("a cat") as stream: async for delta in stream: ...`.
    `ScopeStream` documents entering, iterating and leaving.

    A slow reader gets the newest delta of each image. The last delta of an image is never lost.
    """

    def __await__(self) -> Generator[Any, Any, tuple[RGBImage, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[RGBImage, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[RGBImage, ...]:
        """Wait for all images.

        Returns:
            The images, in the order of their indexes.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: an image was not generated. The first such image decides.
            EngineFault: the engine broke.
        """
        return await images_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each image."""
        return self._request.seeds

    @property
    def step_count(self) -> int:
        """Denoising steps of each image. Available after entering."""
        return self._request.wanted.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image. Available after entering."""
        task = self._request.wanted.task
        return task.width, task.height


async def images_of(deltas: AsyncIterable[ImageDelta]) -> tuple[RGBImage, ...]:
    """Wait for all images of a stream. See `ImageStream.pictures`.

    Args:
        deltas: an entered stream.
    """
    made: dict[int, RGBImage] = {}
    async for delta in deltas:
        if (error := error_of(delta)) is not None:
            raise error
        if delta.finish_reason is not None:
            assert delta.image is not None, "a finished image is missing"
            made[delta.index] = delta.image
    return tuple(made[index] for index in sorted(made))
