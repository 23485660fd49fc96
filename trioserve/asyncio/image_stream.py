"""What an asyncio task holds of a request for pictures: await it for all of them, or enter it and leave to abort."""

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
    """`pictures = await engine.generate_image("a cat")`; or, for a look at them meanwhile,
    `async with engine.generate_image("a cat") as stream: async for delta in stream: ...`. See ScopeStream."""

    def __init__(self, thread: TrioThread, stream: TrioImageStream) -> None:
        super().__init__(thread, stream, merge)

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
        return self._stream.seeds

    @property
    def step_count(self) -> int:
        """Denoising steps of each picture; known once it is entered."""
        return self._stream.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each picture; known once it is entered."""
        return self._stream.size
