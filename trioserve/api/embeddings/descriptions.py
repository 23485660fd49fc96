"""Descriptions of paths that return vectors or scores, for the OpenAPI document."""

from __future__ import annotations

from trioserve.api.described_operation import GENERATES, DescribedOperation
from trioserve.api.embeddings.request_types import EmbeddingsBody, RerankBody, ScoreBody
from trioserve.api.embeddings.response_types import Embeddings, Reranked, Scores

__all__ = ["OPERATIONS", "RERANK_PATHS", "SCORE_PATHS"]

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")

EMBED = DescribedOperation(
    summary="Compute a vector for each input",
    description="Fields are OpenAI's and vLLM's. Fields that are not named here are ignored or refused.",
    body=EmbeddingsBody,
    response=Embeddings,
    errors=GENERATES,
    takes_deadlines=True,
)
RERANK = DescribedOperation(
    summary="Order documents by how well they fit a query",
    description="Fields are those of Jina, Cohere and vLLM. Fields that are not named here are ignored or refused.",
    body=RerankBody,
    response=Reranked,
    errors=GENERATES,
    takes_deadlines=True,
)
SCORE = DescribedOperation(
    summary="Score pairs of texts",
    description="Fields are vLLM's. Fields that are not named here are ignored or refused.",
    body=ScoreBody,
    response=Scores,
    errors=GENERATES,
    takes_deadlines=True,
)

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/embeddings"): EMBED,
    **{("POST", path): RERANK for path in RERANK_PATHS},
    **{("POST", path): SCORE for path in SCORE_PATHS},
}
