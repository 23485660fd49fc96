"""Aborts of requests by id.

A request is aborted in the queue, at an endpoint, or in another process of this router. For a partial result, the
router asks the endpoint that runs the request. The endpoint ends the request and returns the partial result, also to
the client of the request. In all other cases, and if the endpoint does not answer in time, the router closes the
connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import msgspec
import trio
from msgspec import UNSET

from trioserve.api.caller import check_may_operate
from trioserve.api.openai.request_types import AbortBody, AbortRequestBody, AbortRequestsBody, decode_body
from trioserve.api.operations.live_requests import (
    REQUEST_PATH,
    AbortedRequests,
    RequestAbort,
    RequestAborts,
    checked_ids,
    unknown_request,
)
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.proxy.early_ends import AbortReport, abort_reports, end_at_endpoint

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.api.operations.live_requests import PartialResult
    from trioserve.proxy.peers.processes import Answer
    from trioserve.proxy.router_context import RouterContext

__all__ = ["abort_for_vllm", "abort_one_or_all", "abort_request", "abort_requests"]

OUTCOMES = (AbortOutcome.ABORTED, AbortOutcome.ALREADY_FINISHED, AbortOutcome.UNKNOWN)


async def abort_request(context: RouterContext) -> None:
    """DELETE /v1/requests/ID: abort one request.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: The caller has no request with this id (404).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    answers = await context.services.processes.ask(context)
    reported = [msgspec.json.decode(answer.body, type=AbortReport) for answer in answers if answer.status == 200]
    ended = (await _everywhere(context, [request_id], reported, with_partials=False))[request_id]
    if ended.result is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json(RequestAbort(id=request_id, result=ended.result))


async def abort_requests(context: RouterContext) -> None:
    """POST /v1/requests/abort: abort several requests. The results have the order of the ids.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The body is invalid.
    """
    raw = await context.exchange.body()
    body = decode_body(raw, AbortBody)
    if body.min_age_seconds:
        raise InvalidRequest(
            "min_age_seconds is set, and a router does not support it: leave it out", param="min_age_seconds"
        )
    ids = checked_ids(body.ids)
    await _respond(context, ids, await context.services.processes.ask(context, raw), with_partials=body.return_partial)


async def abort_one_or_all(context: RouterContext) -> None:
    """POST /abort_request, SGLang's name: abort one request, or all requests of the caller.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The body is invalid.
    """
    raw = await context.exchange.body()
    body = decode_body(raw, AbortRequestBody)
    if bool(body.rid) is body.abort_all:
        raise InvalidRequest("send either the id of a request as rid, or abort_all", param="rid")
    ids = _live_ids(context) if body.abort_all else [body.rid]
    await _respond(context, ids, await context.services.processes.ask(context, raw), with_partials=body.return_partial)


async def abort_for_vllm(context: RouterContext) -> None:
    """POST /abort_requests, vLLM's name: abort the given requests, or all requests of the caller if no ids are given.

    Args:
        context: Request of the router's API.
    """
    raw = await context.exchange.body()
    ids = decode_body(raw, AbortRequestsBody).request_ids
    ids = checked_ids(ids) if ids else _live_ids(context)
    answers = await context.services.processes.ask(context, raw)
    ended = await _everywhere(context, ids, [], with_partials=False)
    count = sum(one.result is AbortOutcome.ABORTED for one in ended.values())
    count += sum(msgspec.json.decode(one.body, type=_Count).aborted for one in answers if one.status == 200)
    await context.respond_json(AbortedRequests(aborted=count))


def _live_ids(context: RouterContext) -> list[str]:
    """Return the ids of the caller's running requests.

    Raises:
        Refusal: The caller may not list requests (403).
    """
    check_may_operate(context.caller)
    live = context.services.fleet.dispatch.live_admissions(owner=context.owner)
    return [admission.id for admission in live if admission.id is not None]


class _Count(msgspec.Struct):
    aborted: int


async def _respond(context: RouterContext, ids: list[str], answers: list[Answer], *, with_partials: bool) -> None:
    reported = [one for answer in answers for one in abort_reports(answer.status, answer.body)]
    ended = await _everywhere(context, ids, reported, with_partials=with_partials)
    results = [
        RequestAbort(
            id=id, result=one.result, partials=cast("list[PartialResult]", one.partials) if with_partials else UNSET
        )
        for id, one in ended.items()
    ]
    await context.respond_json(RequestAborts(data=results))


async def _everywhere(
    context: RouterContext, ids: Iterable[str], reported: list[AbortReport], *, with_partials: bool
) -> dict[str, AbortReport]:
    """Abort requests in this process, and merge the results with the results of the other processes.

    Several requests can have one id. Each process aborts its own requests. The result is "aborted" if at least one
    request was running.

    Args:
        context: Request of the router's API.
        ids: Ids to abort.
        reported: Results of the other processes.
        with_partials: Whether partial results are wanted.
    """
    ended = await _here(context, list(dict.fromkeys(ids)), with_partials=with_partials)
    for one in reported:
        own = ended.setdefault(one.id, one)
        if own is not one:
            own.result = min(own.result, one.result, key=OUTCOMES.index)
            own.partials += one.partials
    return ended


async def _here(context: RouterContext, ids: list[str], *, with_partials: bool) -> dict[str, AbortReport]:
    dispatch, owner = context.services.fleet.dispatch, context.owner
    wanted = frozenset(ids)
    asked: dict[EndpointId, list[AdmissionScope]] = {}
    for admission in dispatch.live_admissions(owner=owner):
        if admission.id in wanted and _is_ended_by_endpoint(admission, with_partials=with_partials):
            assert admission.endpoint is not None
            asked.setdefault(admission.endpoint, []).append(admission)
    ended: dict[str, AbortReport] = {}
    sure: set[int] = set()  # The set has the indices of the requests that an endpoint has confirmed as ended.

    async def ask(id: EndpointId, admissions: list[AdmissionScope]) -> None:
        for one in await end_at_endpoint(context.services.fleet.remote(id), admissions):
            mine = [admission.index for admission in admissions if admission.id == one.id]
            if mine and one.result is not AbortOutcome.UNKNOWN:
                sure.update(mine)
                own = ended.setdefault(one.id, one)
                if own is not one:
                    own.partials += one.partials

    try:
        async with trio.open_nursery() as nursery:
            for endpoint, admissions in asked.items():
                nursery.start_soon(ask, endpoint, admissions)
    finally:  # The router also aborts the remaining requests if the caller has left before the endpoints answered.
        live = dispatch.live_admissions(owner=owner)
        left = {one.id for one in live if one.index not in sure and not one.is_ended}
        rest = dispatch.abort([id for id in ids if id in left or id not in ended], owner=owner)
    for id, outcome in rest.items():
        one = ended.setdefault(id, AbortReport(id, outcome))
        one.result = min(one.result, outcome, key=OUTCOMES.index)
    return {id: ended[id] for id in ids}


def _is_ended_by_endpoint(admission: AdmissionScope, *, with_partials: bool) -> bool:
    """Return True if the router asks the endpoint to end the request, so that the client gets a partial result.

    A prefill for another endpoint has no output yet. So it is not asked for a partial result.
    """
    is_there = admission.endpoint is not None and not admission.is_queued and not admission.is_ended
    return is_there and admission.stage is not Stage.PREFILL and (with_partials or admission.gives_partial)
