"""The caller's side of a pooled request: await it for all results, or enter it, and leave it to abort."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from trioserve.contracts.pooling import PoolingResult
from trioserve.engine.lifecycle.error_of_end import error_of
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.pooling_request import PoolingRequest
from trioserve.engine.request_stream import RequestStream
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["PoolingStream"]


@uninterrupted
class PoolingStream(RequestStream):
    """The results of a pooled request: `vectors = await engine.embed(texts)`.

    To see its progress and its token counts, use `async with engine.embed(texts) as stream: vectors = await
    stream.results()`.

    Entering raises the errors of `RequestStream`. Iteration yields one delta per input, in the order in which the
    inputs end, with the input's index and its finish reason. `results` does this iteration itself.
    """

    def __init__(
        self,
        request: PoolingRequest,
        *,
        submit: Callable[[OpenRequest], Awaitable[None]],
        leave: Callable[[OpenRequest], None],
        own_run: OwnRun,
    ) -> None:
        super().__init__(request, submit=submit, leave=leave, own_run=own_run)
        self._inputs = request

    def __await__(self) -> Generator[Any, Any, tuple[PoolingResult, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[PoolingResult, ...]:
        async with self:
            return await self.results()

    async def results(self) -> tuple[PoolingResult, ...]:
        """Wait for the results of all inputs.

        Returns:
            One result per input, in the order of the inputs.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: an input ended without a result. The first such input
                decides.
            EngineFault: the engine broke.
        """
        async for delta in self:
            if (error := error_of(delta)) is not None:
                raise error
        return self.pooled

    @property
    def pooled(self) -> tuple[PoolingResult, ...]:
        """Results of a stream that was read to its end without an error, in the order of the inputs."""
        found = tuple(choice.pooled for choice in self._inputs.choices if choice.pooled is not None)
        assert len(found) == len(self._inputs.inputs), "an input has no result"
        return found

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Tokens of each input. Available after entering."""
        return self._inputs.input_token_counts
