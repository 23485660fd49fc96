"""What responses with vectors and scores look like, as types: for the API's description."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import Response

__all__ = ["Embeddings", "Reranked", "Scores"]


class PooledUsage(Response):
    """prompt_tokens: of all inputs, cut ones as they were computed. completion_tokens is 0, for clients that look."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Response):
    """embedding: a list of numbers, or their float32 in little-endian order as base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Response):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage


class RankedDocument(Response):
    text: str


class RankedResult(Response):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Response):
    """results: best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: PooledUsage


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
    usage: PooledUsage
