"""A request for images that an asyncio task makes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trioserve.asyncio.scope_stream import ScopeStream
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.contracts.image_generation import ImageDelta, Picture
from trioserve.engine.images.image_stream import ImageStream as TrioImageStream
from trioserve.engine.images.image_stream import pictures_of
from trioserve.engine.images.open_image import merge

__all__ = ["ImageStream"]


class ImageStream(ScopeStream[TrioImageStream, ImageDelta]):
    """A request for images. Await the stream to get all images, or enter it to read partial images. Leaving the stream
    aborts the request.

    Shortest use: `pictures = await engine.generate_image("a cat")`. With partial images: `async with
    engine.generate_image("a cat") as stream: async for delta in stream: ...`. See ScopeStream.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
    """

    def __init__(self, thread: TrioThread, stream: TrioImageStream) -> None:
        super().__init__(thread, stream, merge)

    def __await__(self) -> Generator[Any, Any, tuple[Picture, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[Picture, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[Picture, ...]:
        """Wait until all images are finished, and return them in the order of the request.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the reason why the first unfinished image was not finished.
            EngineFault: the engine failed for good.
        """
        return await pictures_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image."""
        return self._stream.seeds

    @property
    def step_count(self) -> int:
        """Number of denoising steps of each image. Known once the stream is entered."""
        return self._stream.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image in pixels. Known once the stream is entered."""
        return self._stream.size
