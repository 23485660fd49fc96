"""A pooling request that an asyncio task makes."""

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
    """A pooling request. Await the stream to get the results, or enter it and call `results`. Leaving the stream aborts
    the request.

    Shortest use: `vectors = await engine.embed(texts)`. With access to the stream's properties: `async with
    engine.embed(texts) as stream: vectors = await stream.results()`.

    Iterating yields one delta for each input, with the index of the input and the reason why it ended. `results`
    iterates by itself.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
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
        """Wait until all inputs are computed, and return the results in the order of the inputs.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the reason why the first input without a result has none.
            EngineFault: the engine failed for good.
        """
        async for delta in self:
            if (error := error_of(delta)) is not None:
                raise error
        return self.pooled

    @property
    def pooled(self) -> tuple[Pooled, ...]:
        """The results. Valid once the stream was read to its end without an error."""
        return self._pooled_stream.pooled

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Number of tokens of each input. Known once the stream is entered."""
        return self._pooled_stream.input_token_counts
