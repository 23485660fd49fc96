"""What a task holds of a request that is pooled: await it for everything at once, or enter it and leave to abort."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from trioserve.contracts.pooling import Pooled
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.pooled_request import PooledRequest
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.shell.error_of_end import error_of
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["PooledStream"]


@uninterrupted
class PooledStream(RequestStream):
    """`vectors = await engine.embed(texts)`; or, for a look at it meanwhile and at what it has cost,
    `async with engine.embed(texts) as stream: vectors = await stream.results()`.

    Entering raises what a RequestStream's does. Iterating yields one delta for each input, with its index and why it
    ended, in the order in which they do; `results` does that by itself.
    """

    def __init__(
        self,
        request: PooledRequest,
        *,
        submit: Callable[[OpenRequest], Awaitable[None]],
        leave: Callable[[OpenRequest], None],
        own_run: OwnRun,
    ) -> None:
        super().__init__(request, submit=submit, leave=leave, own_run=own_run)
        self._inputs = request

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
        found = tuple(choice.pooled for choice in self._inputs.choices if choice.pooled is not None)
        assert len(found) == len(self._inputs.inputs), "not every input has ended well"
        return found

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Of each input; known once it is entered."""
        return self._inputs.input_token_counts
