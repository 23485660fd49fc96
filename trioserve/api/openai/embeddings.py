"""POST /v1/embeddings, /pooling, /v1/rerank and /v1/score: vectors of texts, and scores of how texts fit together.

An input is a text, a list of token ids, or a chat. A model with a scoring head scores each pair of texts. For other
models, the score is the cosine of the texts' vectors. The bodies have the fields of OpenAI, vLLM, Cohere and Jina.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast

import msgspec
import trio
from msgspec import UNSET, UnsetType

from trioserve.api.generation import read_streams
from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.request_types import Int32, TokenizeBody, check_cache_salt, deadlines_of
from trioserve.api.request_context import PoolingFields, RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import DIMENSIONS_MAX, INPUTS_MAX, PoolingInput, PoolingParams, PoolingResult, TextPair
from trioserve.contracts.prompt import Prompt
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN

if TYPE_CHECKING:
    from trioserve.engine.request_stream import PoolingStream

__all__ = [
    "Embedding",
    "Embeddings",
    "EmbeddingsBody",
    "OPERATIONS",
    "PoolBody",
    "Pooled",
    "PooledList",
    "PoolingBody",
    "PoolingResponse",
    "RankedDocument",
    "RankedResult",
    "RerankBody",
    "Reranked",
    "Score",
    "ScoreBody",
    "Scores",
    "add_vectors",
    "create_embeddings",
    "create_pooling",
    "pool",
    "rerank",
    "score",
]


Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
TruncateTo = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)]
TopN = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all pooling requests share.

    Attributes:
        user: accepted and ignored.
        truncate_prompt_tokens: largest number of tokens of an input. A longer input is truncated. -1: as many as the
            model accepts. null: a longer input is refused.
        truncation_side: side from which tokens are removed.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: TruncateTo | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None

    def check(self) -> None:
        """Check rules that types cannot express.

        Raises:
            InvalidRequest: a rule is broken. The error names the field.
        """
        check_cache_salt(self.cache_salt)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, allowed is 1 or more, or -1 for as many as the model accepts",
                param="truncate_prompt_tokens",
            )


class EmbeddingsBody(PoolingBody, frozen=True, kw_only=True):
    """Body of /v1/embeddings, with either input or messages.

    Attributes:
        messages: one chat, which the model's template turns into text.
        pooling: this server's own field. null: the model's method.
        normalize: this server's own field. null: as the model does.
    """

    input: str | list[str | Int32 | list[Int32]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(method=self.pooling, normalize=self.normalize, dimensions=self.dimensions)


class PoolBody(EmbeddingsBody, frozen=True, kw_only=True):
    """Body of /pooling, with either input or messages.

    Attributes:
        task: "embed": one vector for each input. "token_embed": a vector for each token. "token_classify": the
            probabilities of the model's labels for each token. null: token_classify for a model that labels tokens,
            otherwise embed.
    """

    task: Literal["embed", "token_embed", "token_classify"] | None = None


class RerankDocument(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankBody(PoolingBody, frozen=True, kw_only=True):
    """Body of /v1/rerank.

    Attributes:
        top_n: number of best documents in the response. null or 0: all.
    """

    query: str
    documents: list[str | RerankDocument]
    top_n: TopN | None = None
    return_documents: bool | None = None


class ScoreBody(PoolingBody, frozen=True, kw_only=True):
    """Body of /v1/score, with either text_1 and text_2, or queries and documents, which mean the same.

    One text on the left is compared with each text on the right. Otherwise both sides have the same number of texts,
    and texts with the same index are compared.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class PoolingUsage(Response):
    """Token counts.

    Attributes:
        prompt_tokens: tokens of all inputs, after truncation.
        completion_tokens: always 0, for clients that read it.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Response, tag_field="object", tag="embedding"):
    """One vector.

    Attributes:
        embedding: list of numbers, or base64 of float32 in little-endian order.
    """

    index: int
    embedding: list[float] | bytes


class Embeddings(Response, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(Response, tag_field="object", tag="pooling"):
    """Result of one input.

    Attributes:
        data: list of numbers. For a task with a result for each token, one list for each token. Or base64 of float32 in
            little-endian order.
    """

    index: int
    data: list[float | list[float]] | bytes


class PooledList(Response, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class RankedDocument(Response):
    text: str


class RankedResult(Response):
    """Score of one document.

    Attributes:
        index: index of the document in the request.
    """

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Response):
    """Ranked documents.

    Attributes:
        results: scores of the documents, best first.
    """

    id: str
    model: str
    results: list[RankedResult]
    usage: PoolingUsage


class Score(Response, tag_field="object", tag="score"):
    index: int
    score: float


class Scores(Response, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


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
    body: PoolingFields,
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


async def _pooled(context: RequestContext, body: EmbeddingsBody, params: PoolingParams) -> PoolingResponse:
    inputs = _inputs(context, body)
    is_one = not isinstance(body.input, list) or isinstance(body.input[0], int)
    name = "messages" if body.input is None else "input"
    return await pool(
        context,
        body,
        inputs,
        params,
        name_of=lambda index: name if is_one else f"input[{index}]",
        add_special_tokens=body.add_special_tokens is not False,
        is_base64=body.encoding_format == "base64",
    )


async def create_pooling(context: RequestContext) -> None:
    body = await context.body(PoolBody)
    model = context.model_name(body.model)
    body.check()
    pooled, is_base64 = context.engine.model.pooled, body.encoding_format == "base64"
    task = body.task or ("token_classify" if pooled is not None and pooled.label_count else "embed")
    response = await _pooled(context, body, msgspec.structs.replace(body.params(), task=task))
    if task != "embed":  # Only now are the numbers of tokens known.
        row_count = sum(len(one) // one.row_size for one in response.pooled)
        context.response_bound.check_vectors(row_count, response.pooled[0].row_size, is_base64=is_base64)

    def written(index: int, result: PoolingResult) -> Pooled:
        if is_base64:
            return Pooled(index=index, data=result.data)
        numbers: list[float | list[float]] = [*result.rows()] if result.row_size else [*result.values()]
        return Pooled(index=index, data=numbers)

    large = LargeJson()
    await context.respond_large(
        large,
        PooledList(
            id=f"pool-{context.request_id}",
            created=context.clock_and_ids.unix_seconds(),
            model=model,
            data=await add_vectors(large, response.pooled, written),
            usage=response.usage,
        ),
    )


async def create_embeddings(context: RequestContext) -> None:
    body = await context.body(EmbeddingsBody)
    model = context.model_name(body.model)
    body.check()
    response = await _pooled(context, body, body.params())
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
        written: returns the entry of the list, from the vector's index and the vector.
    """
    return await large.add_one_by_one(
        (len(vector), functools.partial(written, index, vector)) for index, vector in enumerate(vectors)
    )


DOCUMENTS_MAX = 1024  # The documents and the query together stay below the limit on the inputs of one request.

Name = Callable[[int], str]
"""Returns the name of a text in errors, from its index."""


# Between two checkpoints, at most this number of values is multiplied, which takes a few milliseconds.
PIECE_NUMBERS_MAX = 50_000


async def cosines(left: Sequence[PoolingResult], right: Sequence[PoolingResult]) -> list[float]:
    """Compute cosine similarities of vectors of length 1. Other tasks may run during the computation.

    Args:
        left: one vector, or as many vectors as `right` has.
        right: vectors. Each is compared with the left vector of the same index, or with the only one.
    """
    found: list[float] = []
    number_count = 0
    first = left[0].values()
    for index, one in enumerate(right):
        other = first if len(left) == 1 else left[index].values()
        product = sum(map(operator.mul, other, one.values()))
        found.append(max(-1.0, min(1.0, product)))
        number_count += len(one)
        if number_count >= PIECE_NUMBERS_MAX:
            number_count = 0
            await trio.lowlevel.checkpoint()
    return found


async def rerank(context: RequestContext) -> None:
    body = await context.body(RerankBody)
    model = context.model_name(body.model)
    body.check()
    if not body.documents:
        raise InvalidRequest("documents is an empty list, at least one is needed", param="documents")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scores, usage = await _scores(context, body, [body.query], texts, ("query", "documents"))
    best_first = sorted(range(len(texts)), key=lambda index: -scores[index])
    results = [
        RankedResult(
            index=index,
            relevance_score=scores[index],
            document=UNSET if body.return_documents is False else RankedDocument(text=texts[index]),
        )
        for index in best_first[: body.top_n or None]
    ]
    await context.respond_json(Reranked(id=f"rerank-{context.request_id}", model=model, results=results, usage=usage))


async def score(context: RequestContext) -> None:
    body = await context.body(ScoreBody)
    model = context.model_name(body.model)
    body.check()
    left, right, names = _sides(body)
    scores, usage = await _scores(context, body, left, right, names)
    await context.respond_json(
        Scores(
            id=f"score-{context.request_id}",
            created=context.clock_and_ids.unix_seconds(),
            model=model,
            data=[Score(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )
    )


def _sides(body: ScoreBody) -> tuple[list[str], list[str], tuple[str, str]]:
    """Return the texts of both sides, and the names of their fields. Raise InvalidRequest if the numbers of texts do
    not match.
    """
    names = ("text_1", "text_2") if body.queries is None and body.documents is None else ("queries", "documents")
    sides: list[list[str]] = []
    for name in names:
        given = getattr(body, name)
        if given is None:
            raise InvalidRequest("send text_1 and text_2, or queries and documents", param=name)
        sides.append([given] if isinstance(given, str) else given)
        if not sides[-1]:
            raise InvalidRequest(f"{name} is an empty list, at least one is needed", param=name)
    left, right = sides
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"{names[0]} has {len(left)} texts and {names[1]} has {len(right)}: send one text to "
            "compare with all others, or the same number on both sides",
            param=names[0],
        )
    return left, right, names


async def _scores(
    context: RequestContext, body: PoolingBody, left: Sequence[str], right: Sequence[str], names: tuple[str, str]
) -> tuple[list[float], PoolingUsage]:
    """Return one score for each text on the right. Raise InvalidRequest if there are too many texts."""
    if len(right) > DOCUMENTS_MAX:
        raise InvalidRequest(
            f"{names[1]} has {len(right)} entries, at most {DOCUMENTS_MAX} are allowed", param=names[1]
        )
    pooled = context.engine.model.pooled
    left_name, right_name = (_name(name, getattr(body, name)) for name in names)
    if pooled is not None and pooled.scores_pairs:
        pairs = [TextPair(left[index if len(left) > 1 else 0], text) for index, text in enumerate(right)]
        response = await pool(context, body, pairs, PoolingParams(task="score"), name_of=right_name)
        return [one.values()[0] for one in response.pooled], response.usage
    response = await pool(
        context,
        body,
        [*left, *right],
        PoolingParams(normalize=True),
        name_of=lambda index: left_name(index) if index < len(left) else right_name(index - len(left)),
    )
    vectors = response.pooled
    return await cosines(vectors[: len(left)], vectors[len(left) :]), response.usage


def _name(name: str, given: object) -> Name:
    return (lambda index: name) if isinstance(given, str) else (lambda index: f"{name}[{index}]")


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
    Operation(
        method="POST",
        path="/pooling",
        handler=create_pooling,
        summary="Compute a vector for each input, or a result for each token",
        forwarding=Forwarding.BY_MODEL,
        description="Fields are vLLM's. Fields that are not named here are ignored or refused.",
        body=PoolBody,
        response=PooledList,
        errors=GENERATES,
        takes_deadlines=True,
    ),
    *(
        Operation(
            method="POST",
            path=path,
            handler=rerank,
            summary="Order documents by how well they fit a query",
            forwarding=Forwarding.BY_MODEL,
            description="Fields are those of Jina, Cohere and vLLM. Fields that are not named here are ignored or "
            "refused.",
            body=RerankBody,
            response=Reranked,
            errors=GENERATES,
            takes_deadlines=True,
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation(
            method="POST",
            path=path,
            handler=score,
            summary="Score pairs of texts",
            forwarding=Forwarding.BY_MODEL,
            description="Fields are vLLM's. Fields that are not named here are ignored or refused.",
            body=ScoreBody,
            response=Scores,
            errors=GENERATES,
            takes_deadlines=True,
        )
        for path in ("/v1/score", "/score")
    ),
)
