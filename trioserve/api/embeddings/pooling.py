"""From a body to the engine and back, for everything that is pooled: one request, however many inputs it has, in one
scope. A client that leaves, or an input that fails, ends all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trioserve.api.deadline_fields import deadlines_of
from trioserve.api.embeddings.response_types import PooledUsage
from trioserve.api.generation import read_streams
from trioserve.api.request_context import AsksPooling, RequestContext
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import Pooled, PooledInput, PoolingParams

if TYPE_CHECKING:
    from trioserve.engine.pooled_stream import PooledStream

__all__ = ["PooledResponse", "pool"]


class PooledResponse(NamedTuple):
    pooled: tuple[Pooled, ...]
    usage: PooledUsage
    cached_token_count: int


async def pool(
    context: RequestContext,
    body: AsksPooling,
    inputs: Sequence[PooledInput],
    params: PoolingParams,
    *,
    name_of: Callable[[int], str],
    add_special_tokens: bool = True,
    is_base64: bool | None = None,
) -> PooledResponse:
    """Compute what each input gives, in their order. When this returns, the request's scope is left.

    Args:
        name_of: What an input is called in an error, by its index.
        is_base64: How the vectors are written; None: the response has none.

    Raises:
        TrioserveError: What the engine raises, and what is said of a request that ended in another way than it should.
    """
    deadlines = deadlines_of(body, context.exchange.headers)
    asked = context.embed(
        inputs,
        params,
        body,
        deadlines,
        name_of=name_of,
        add_special_tokens=add_special_tokens,
        is_base64=is_base64,
    )
    async with asked as stream:
        await _read(stream)
        token_count = stream.prompt_token_count
        usage = PooledUsage(prompt_tokens=token_count, total_tokens=token_count)
        return PooledResponse(stream.pooled, usage, stream.cached_token_count)


async def _read(stream: PooledStream) -> None:
    async def take(_stream_index: int, _delta: Delta) -> None:
        """What it gave is kept by the stream."""

    await read_streams([stream], take)
