"""Abort requests to a text engine, with their partial results if asked for.

POST /v1/requests/abort, SGLang's /abort_request, and vLLM's /abort_requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trioserve.api.caller import check_may_operate
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import AbortBody, AbortRequestBody, AbortRequestsBody
from trioserve.api.operations.live_requests import checked_ids, respond_aborted
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.api.streams.cursors import resume_body, shown_logprobs
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.contracts.partial import AbortResult, Partial

__all__ = ["OPERATIONS", "abort_for_sglang", "abort_for_vllm", "abort_with_partials"]


async def abort_with_partials(context: RequestContext) -> None:
    """Abort several requests. Responds with one result for each id, in the same order.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
    """
    body = await context.body(AbortBody)
    if body.min_age_seconds:
        if body.return_partial:
            raise InvalidRequest(
                "min_age_seconds and return_partial are both set: leave one of them out", param="min_age_seconds"
            )
        await respond_aborted(context, body)
        return
    cut = context.engine.abort_with_partial(checked_ids(body.ids), owner=context.owner)
    await _respond(context, cut, with_partials=body.return_partial)


async def abort_for_sglang(context: RequestContext) -> None:
    """Abort one request, or all requests of the caller, as SGLang's /abort_request.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has both an id and abort_all, or neither.
        Refusal: a stranger may not abort all requests (403).
    """
    body = await context.body(AbortRequestBody)
    if bool(body.rid) is body.abort_all:
        raise InvalidRequest("send either the id of a request as rid, or abort_all", param="rid")
    ids = [body.rid]
    if body.abort_all:
        check_may_operate(context.caller)
        ids = [view.id for view in context.engine.live_requests(owner=context.owner)]
    cut = context.engine.abort_with_partial(ids, owner=context.owner)
    await _respond(context, cut, with_partials=body.return_partial)


async def abort_for_vllm(context: RequestContext) -> None:
    """Abort requests as vLLM's /abort_requests: those with the ids, or all of the caller if there are no ids.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: a stranger may not abort all requests (403).
    """
    ids = (await context.body(AbortRequestsBody)).request_ids
    if ids:
        checked_ids(ids)
    else:
        check_may_operate(context.caller)
        ids = [view.id for view in context.engine.live_requests(owner=context.owner)]
    outcomes = context.engine.abort(ids, owner=context.owner)
    aborted = sum(outcome is AbortOutcome.ABORTED for outcome in outcomes.values())
    await context.respond_json({"status": "aborted", "aborted": aborted})


async def _respond(context: RequestContext, cut: Mapping[str, AbortResult], *, with_partials: bool) -> None:
    data = []
    for request_id, one in cut.items():
        row: dict[str, object] = {"id": request_id, "object": "request.abort", "result": one.outcome.value}
        if with_partials:
            row["partials"] = [_shown(partial) for partial in one.partials]
        data.append(row)
    await context.respond_json({"object": "list", "data": data})


def _shown(partial: Partial) -> dict[str, object]:
    resume = partial.resume
    return {
        "choices": [
            {
                "index": index,
                "token_ids": choice.token_ids,
                "logprobs": None if choice.logprobs is None else shown_logprobs(choice.logprobs),
                "weight_versions": choice.weight_versions,
                "finish_reason": None if choice.finish_reason is None else choice.finish_reason.value,
            }
            for index, choice in enumerate(partial.choices)
        ],
        "resume": resume_body([resume], prompt_digest=resume.prompt_digest, seed=resume.seed),
    }


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/requests/abort",
        handler=abort_with_partials,
        summary="Abort several requests",
        description="With return_partial, the response has the partial result of each request, which can be resumed.",
        body=AbortBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    Operation(
        method="POST",
        path="/abort_request",
        handler=abort_for_sglang,
        summary="Abort one request, or all of the caller (SGLang's name)",
        body=AbortRequestBody,
        response=response_types.RequestAborts,
        errors=READS_BODY,
    ),
    Operation(
        method="POST",
        path="/abort_requests",
        handler=abort_for_vllm,
        summary="Abort several requests (vLLM's name)",
        body=AbortRequestsBody,
        response=response_types.AbortedRequests,
        errors=READS_BODY,
    ),
)
