"""Handlers of POST /api/embed and /api/embeddings: return a vector for each text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.api.embeddings.embeddings import add_vectors
from trioserve.api.embeddings.pooling import pool
from trioserve.api.ollama import response_types
from trioserve.api.ollama.answer import nanoseconds
from trioserve.api.ollama.models import requested_model
from trioserve.api.ollama.request_types import OllamaEmbedBody, OllamaEmbeddingsBody
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.sse import encode
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import INPUTS_MAX, PoolingParams

if TYPE_CHECKING:
    from trioserve.contracts.pooling import PoolingResult

__all__ = ["OPERATIONS", "embed", "embed_one"]


async def embed(context: RequestContext) -> None:
    """Answer with one vector for each text. All vectors are normalized to length 1.

    Args:
        context: The request.
    """
    began_at = trio.current_time()
    body = await context.body(OllamaEmbedBody)
    model = requested_model(context, body.model)
    check_cache_salt(body.cache_salt)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise InvalidRequest(f"input has {len(inputs)} entries, allowed are 1 to {INPUTS_MAX}", param="input")
    response = await pool(
        context,
        body,
        inputs,
        PoolingParams(normalize=True, dimensions=body.dimensions),
        name_of=lambda index: "input" if isinstance(body.input, str) else f"input[{index}]",
        is_base64=False,
    )
    large = LargeJson()
    await context.respond_large(
        large,
        {
            "model": body.model or model,
            "embeddings": await add_vectors(large, response.pooled, _numbers),
            "total_duration": nanoseconds(trio.current_time() - began_at),
            "load_duration": 0,
            "prompt_eval_count": response.usage.prompt_tokens,
        },
    )


async def embed_one(context: RequestContext) -> None:
    """Answer the older kind of request: one text.

    The vector is normalized only if the model's configuration says so.

    Args:
        context: The request.
    """
    body = await context.body(OllamaEmbeddingsBody)
    requested_model(context, body.model)
    check_cache_salt(body.cache_salt)
    response = await pool(context, body, [body.prompt], PoolingParams(), name_of=lambda _: "prompt")
    await context.respond_bytes(b'{"embedding":%b}' % _numbers(0, response.pooled[0]), "application/json")


def _numbers(_index: int, vector: PoolingResult) -> bytes:
    return encode(vector.values())


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/api/embed",
        handler=embed,
        summary="Make vectors of texts, in Ollama's shape",
        forwarding=Forwarding.BY_MODEL,
        body=OllamaEmbedBody,
        response=response_types.OllamaEmbeddings,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/api/embeddings",
        handler=embed_one,
        summary="Make a vector of one text, in Ollama's older shape",
        forwarding=Forwarding.BY_MODEL,
        body=OllamaEmbeddingsBody,
        response=response_types.OllamaEmbedding,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
)
