"""Types of responses with vectors and scores, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import Response

__all__ = ["Embeddings", "Reranked", "Scores"]


class PoolingUsage(Response):
    """Token counts.

    Attributes:
        prompt_tokens: tokens of all inputs, after truncation.
        completion_tokens: always 0, for clients that read it.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Response):
    """One vector.

    Attributes:
        embedding: list of numbers, or base64 of float32 in little-endian order.
    """

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Response):
    id: str
    object: Literal["list"]
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


class Score(Response):
    object: Literal["score"]
    index: int
    score: float


class Scores(Response):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
