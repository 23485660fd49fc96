"""POST /v1/embeddings: computes a vector for each text, list of token ids, or chat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from trioserve.api.embeddings.bodies import Embedding, Embeddings, EmbeddingsBody, PoolingUsage
from trioserve.api.generation import read_streams
from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.request_types import TokenizeBody, deadlines_of
from trioserve.api.request_context import AsksPooling, RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import INPUTS_MAX, PoolingInput, PoolingParams, PoolingResult
from trioserve.contracts.prompt import Prompt

if TYPE_CHECKING:
    from trioserve.engine.request_stream import PoolingStream

__all__ = ["OPERATIONS", "PoolingResponse", "add_vectors", "create_embeddings", "pool"]

T = TypeVar("T")


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
    """Compute the result of each input, in order. When this function returns, the scope of the engine request has been
    left.

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


async def create_embeddings(context: RequestContext) -> None:
    body = await context.body(EmbeddingsBody)
    model = context.model_name(body.model)
    body.check()
    inputs = _inputs(context, body)
    is_one = not isinstance(body.input, list) or isinstance(body.input[0], int)
    name = "messages" if body.input is None else "input"
    response = await pool(
        context,
        body,
        inputs,
        body.params(),
        name_of=lambda index: name if is_one else f"input[{index}]",
        add_special_tokens=body.add_special_tokens is not False,
        is_base64=body.encoding_format == "base64",
    )
    large = LargeJson()
    write = _as_base64 if body.encoding_format == "base64" else _as_numbers
    await context.respond_large(
        large,
        Embeddings(
            id=f"embd-{context.request_id}",
            created=context.clock_and_ids.unix_seconds(),
            model=model,
            data=await add_vectors(large, response.pooled, write),
            usage=response.usage,
        ),
    )


def _inputs(context: RequestContext, body: EmbeddingsBody) -> list[Prompt]:
    """Convert the four types of `input`, or the chat, into a list of prompts."""
    given = body.input
    if (given is None) == (body.messages is None):
        raise InvalidRequest("send either input or messages", param="input" if given is None else "messages")
    if body.messages is not None:
        chat = TokenizeBody(messages=body.messages, add_generation_prompt=False)
        return [chat_prompt(chat, trust_chat_template=context.services.trust_chat_template)]
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("input is an empty list, at least one is needed", param="input")
    kind = type(given[0])
    if any(type(one) is not kind for one in given):
        raise InvalidRequest("input mixes strings, token ids and lists: it must be a list of one kind", param="input")
    if kind is int:
        return [cast("list[int]", given)]
    if len(given) > INPUTS_MAX:
        raise InvalidRequest(f"input has {len(given)} entries, at most {INPUTS_MAX} are allowed", param="input")
    return cast("list[Prompt]", given)


def _as_base64(index: int, vector: PoolingResult) -> Embedding:
    return Embedding(index=index, embedding=vector.data)


def _as_numbers(index: int, vector: PoolingResult) -> Embedding:
    return Embedding(index=index, embedding=vector.values())


async def add_vectors(
    large: LargeJson, vectors: Sequence[PoolingResult], written: Callable[[int, PoolingResult], T]
) -> list[T]:
    """Encode a list of vectors, which `large` then sends.

    Args:
        large: encodes large lists.
        vectors: the vectors.
        written: returns the entry of the list, from the vector's index and the vector.
    """
    return await large.add_one_by_one(
        (len(vector), functools.partial(written, index, vector)) for index, vector in enumerate(vectors)
    )


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/embeddings",
        handler=create_embeddings,
        summary="Compute a vector for each input",
        forwarding=Forwarding.BY_MODEL,
        description="Fields are OpenAI's and vLLM's. Fields that are not named here are ignored or refused.",
        body=EmbeddingsBody,
        response=Embeddings,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
