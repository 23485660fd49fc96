"""Bodies of requests for vectors or scores and of their responses, with fields of OpenAI, vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.request_types import Int32, check_cache_salt
from trioserve.api.response import Response
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import DIMENSIONS_MAX, PoolingParams
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN

__all__ = [
    "Embedding",
    "Embeddings",
    "EmbeddingsBody",
    "PoolingBody",
    "RankedDocument",
    "RankedResult",
    "RerankBody",
    "Reranked",
    "Score",
    "ScoreBody",
    "Scores",
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
