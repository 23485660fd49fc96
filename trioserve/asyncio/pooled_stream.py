"""What an asyncio task holds of a request that is pooled: await it, or enter it and leave to abort, as on Trio."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from trioserve.asyncio.request_stream import RequestStream
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.contracts.pooling import Pooled
from trioserve.engine.pooled_stream import PooledStream as TrioPooledStream
from trioserve.engine.shell.error_of_end import error_of

__all__ = ["PooledStream"]


class PooledStream(RequestStream):
    """`vectors = await engine.embed(texts)`; or, for a look at it meanwhile and at what it has cost,
    `async with engine.embed(texts) as stream: vectors = await stream.results()`.

    Iterating yields one delta for each input, with its index and why it ended; `results` does that by itself.
    """

    def __init__(self, thread: TrioThread, stream: TrioPooledStream) -> None:
        super().__init__(thread, stream)
        self._pooled_stream = stream

    def __await__(self) -> Generator[Any, Any, tuple[Pooled, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[Pooled, ...]:
        async with self:
            return await self.results()

    async def results(self) -> tuple[Pooled, ...]:
        """What each input gave, in the order of the inputs, when all have. Raises RequestFailed, RequestAborted or
        DeadlinePassed for the first one that gave nothing, and EngineFault."""
        async for delta in self:
            if (error := error_of(delta)) is not None:
                raise error
        return self.pooled

    @property
    def pooled(self) -> tuple[Pooled, ...]:
        """The same, of one that was read to its end without an error."""
        return self._pooled_stream.pooled

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Of each input; known once it is entered."""
        return self._pooled_stream.input_token_counts
