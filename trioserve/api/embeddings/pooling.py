"""Pooling requests: from a body to the engine and back.

All inputs are one request with one scope. If the client leaves or an input fails, the whole request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trioserve.api.deadline_fields import deadlines_of
from trioserve.api.embeddings.response_types import PoolingUsage
from trioserve.api.generation import read_streams
from trioserve.api.request_context import AsksPooling, RequestContext
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import PoolingInput, PoolingParams, PoolingResult

if TYPE_CHECKING:
    from trioserve.engine.request_stream import PoolingStream

__all__ = ["PoolingResponse", "pool"]


class PoolingResponse(NamedTuple):
    """Results of a pooling request.

    Attributes:
        pooled: result of each input.
        usage: token counts.
        cached_token_count: tokens that were found in the prefix cache.
    """

    pooled: tuple[PoolingResult, ...]
    usage: PoolingUsage
    cached_token_count: int


async def pool(
    context: RequestContext,
    body: AsksPooling,
    inputs: Sequence[PoolingInput],
    params: PoolingParams,
    *,
    name_of: Callable[[int], str],
    add_special_tokens: bool = True,
    is_base64: bool | None = None,
) -> PoolingResponse:
    """Compute the result of each input, in order. On return, the request's scope is left.

    Args:
        context: the request.
        body: body of the request.
        inputs: texts, token ids or pairs.
        params: kind and size of the result.
        name_of: names the field of the input with this index, for error messages.
        add_special_tokens: True: tokenization adds the model's special tokens.
        is_base64: True: the response has vectors in base64. False: as numbers. None: it has no vectors.

    Raises:
        TrioserveError: the engine refused or failed the request, or the request was aborted.
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
        usage = PoolingUsage(prompt_tokens=token_count, total_tokens=token_count)
        return PoolingResponse(stream.pooled, usage, stream.cached_token_count)


async def _read(stream: PoolingStream) -> None:
    async def take(_stream_index: int, _delta: Delta) -> None:
        """Ignore the delta, since the stream keeps the result."""

    await read_streams([stream], take)
