"""The bodies of requests whose texts become vectors or scores: fields of OpenAI, vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.api.openai.request_types import Int32, check_cache_salt
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import DIMENSIONS_MAX, PoolingParams
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN

__all__ = ["EmbeddingsBody", "PooledBody", "RerankBody", "ScoreBody"]

Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_MIN, le=PRIORITY_MAX)]
TruncateTo = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)]
TopN = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PooledBody(msgspec.Struct, frozen=True, kw_only=True):
    """What they have in common. truncate_prompt_tokens: an input with more tokens is cut to as many, -1: to as many as
    the model takes. truncation_side: where it is cut."""

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
        """Raises InvalidRequest for what no type can say."""
        check_cache_salt(self.cache_salt)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, allowed is 1 or more, or -1 for as many as the model takes",
                param="truncate_prompt_tokens",
            )


class EmbeddingsBody(PooledBody, frozen=True, kw_only=True):
    """Either input or messages, which are one chat to be rendered with the model's template. pooling and normalize are
    this server's own: by default they are the model's."""

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


class RerankBody(PooledBody, frozen=True, kw_only=True):
    """top_n: so many of the best; None and 0: all."""

    query: str
    documents: list[str | RerankDocument]
    top_n: TopN | None = None
    return_documents: bool | None = None


class ScoreBody(PooledBody, frozen=True, kw_only=True):
    """Either text_1 and text_2, or queries and documents, which mean the same. One text on the left is compared with
    each on the right; otherwise there are as many of both, and each is compared with its own."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
