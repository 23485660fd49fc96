"""POST /v1/rerank and /v1/score: scores how well texts fit together.

A model with a scoring head scores each pair. For other models, the score is the cosine of the texts' vectors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import trio
from msgspec import UNSET

from trioserve.api.openai.embeddings import (
    PoolingBody,
    PoolingUsage,
    RankedDocument,
    RankedResult,
    RerankBody,
    Reranked,
    Score,
    ScoreBody,
    Scores,
    pool,
)
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import PoolingParams, PoolingResult, TextPair

__all__ = ["OPERATIONS", "rerank", "score"]

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
