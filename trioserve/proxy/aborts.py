"""Aborts of requests by id, and hand-overs: the router asks an endpoint to end a request early.

A request is aborted in the queue, at an endpoint, or in another process of this router. For a partial result, the
router asks the endpoint that runs the request. The endpoint ends the request and returns the partial result, also to
the client of the request. In all other cases, and if the endpoint does not answer in time, the router closes the
connection.

A stream is handed over when its endpoint is being drained. The endpoint ends the stream between two steps, after a
complete group of tokens, and keeps the KV for the next endpoint if it can. Otherwise the next endpoint computes the
prompt again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import trio

from trioserve.api.caller import check_may_operate
from trioserve.api.openai.request_types import AbortBody, AbortRequestBody, AbortRequestsBody, decode_body
from trioserve.api.operations.live_requests import REQUEST_PATH, checked_ids, unknown_request
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import EndpointLost, InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.proxy.forwarded_headers import KEY_HEADERS

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.proxy.peers.processes import Answer
    from trioserve.proxy.remote_endpoint import RemoteEndpoint
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "ABORTS_PATH",
    "abort_for_vllm",
    "abort_left",
    "abort_one_or_all",
    "abort_request",
    "abort_requests",
    "hand_over",
]

ABORTS_PATH = "/v1/requests/abort"
OUTCOMES = (AbortOutcome.ABORTED, AbortOutcome.ALREADY_FINISHED, AbortOutcome.UNKNOWN)
# An endpoint must answer an abort within this time. It does not wait for its step. Other processes of the router may
# wait for this process.
ANSWER_SECONDS_MAX = 1.0
ANSWER_BYTES_MAX = 32 * 1024 * 1024


async def abort_request(context: RouterContext) -> None:
    """DELETE /v1/requests/ID: abort one request.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: The caller has no request with this id (404).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    answers = await context.services.processes.ask(context)
    reported = [msgspec.json.decode(answer.body, type=_Aborted) for answer in answers if answer.status == 200]
    ended = (await _everywhere(context, [request_id], reported, with_partials=False))[request_id]
    if ended.result is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json({"id": request_id, "object": "request.abort", "result": ended.result.value})


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
    await context.respond_json({"status": "aborted", "aborted": count})


async def abort_left(remote: RemoteEndpoint, headers: list[tuple[str, str]], silent_seconds: float) -> None:
    """Abort a request at an endpoint after its silent connection was closed.

    The endpoint may not receive the close, and would continue to compute the request. A newer request with the same id,
    such as the resumed request, began after the silence and continues.

    Args:
        remote: Client of the endpoint.
        headers: Headers of the request.
        silent_seconds: Time since the last byte from the endpoint.
    """
    id = next((value for name, value in headers if name == "x-request-id"), None)
    if id is None:
        return
    asked = [(name, value) for name, value in headers if name in KEY_HEADERS]
    body = msgspec.json.encode({"ids": [id], "min_age_seconds": silent_seconds / 2})
    with trio.move_on_after(ANSWER_SECONDS_MAX), suppress(EndpointLost, InvalidRequest):
        async with remote.request(
            "POST", ABORTS_PATH, [*asked, ("content-type", "application/json")], body
        ) as response:
            await response.whole(ANSWER_BYTES_MAX)


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


class _Aborted(msgspec.Struct):
    """Result of the abort of one id.

    Attributes:
        id: Id of the request.
        result: Outcome of the abort.
        partials: Partial results of the requests with this id.
    """

    id: str
    result: AbortOutcome
    partials: list[msgspec.Raw] = []


class _Aborts(msgspec.Struct):
    data: list[_Aborted]


async def _respond(context: RouterContext, ids: list[str], answers: list[Answer], *, with_partials: bool) -> None:
    reported = [one for answer in answers for one in _aborts_in(answer.status, answer.body)]
    ended = await _everywhere(context, ids, reported, with_partials=with_partials)
    data: list[dict[str, object]] = []
    for id, one in ended.items():
        row: dict[str, object] = {"id": id, "object": "request.abort", "result": one.result.value}
        data.append({**row, "partials": one.partials} if with_partials else row)
    await context.respond_json({"object": "list", "data": data})


async def _everywhere(
    context: RouterContext, ids: Iterable[str], reported: list[_Aborted], *, with_partials: bool
) -> dict[str, _Aborted]:
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


async def _here(context: RouterContext, ids: list[str], *, with_partials: bool) -> dict[str, _Aborted]:
    dispatch, owner = context.services.fleet.dispatch, context.owner
    wanted = frozenset(ids)
    asked: dict[EndpointId, list[AdmissionScope]] = {}
    for admission in dispatch.live_admissions(owner=owner):
        if admission.id in wanted and _is_ended_by_endpoint(admission, with_partials=with_partials):
            assert admission.endpoint is not None
            asked.setdefault(admission.endpoint, []).append(admission)
    ended: dict[str, _Aborted] = {}
    sure: set[int] = set()  # The set has the indices of the requests that an endpoint has confirmed as ended.

    async def ask(id: EndpointId, admissions: list[AdmissionScope]) -> None:
        for one in await _end_at_endpoint(context, id, admissions):
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
        one = ended.setdefault(id, _Aborted(id, outcome))
        one.result = min(one.result, outcome, key=OUTCOMES.index)
    return {id: ended[id] for id in ids}


def _is_ended_by_endpoint(admission: AdmissionScope, *, with_partials: bool) -> bool:
    """Return True if the endpoint is asked to end the request.

    A prefill for another endpoint has produced no output, so there is no partial result.
    """
    is_there = admission.endpoint is not None and not admission.is_queued and not admission.is_ended
    return is_there and admission.stage is not Stage.PREFILL and (with_partials or admission.gives_partial)


async def _end_at_endpoint(context: RouterContext, id: EndpointId, admissions: list[AdmissionScope]) -> list[_Aborted]:
    """Ask an endpoint to end requests and return partial results, once for each owner of the requests.

    Returns:
        Results of the endpoint. Empty if the endpoint does not answer like a trioserve server.
    """
    rows: list[_Aborted] = []
    owners = {admission.owner: admission for admission in admissions}
    with trio.move_on_after(ANSWER_SECONDS_MAX):
        for owner, first in owners.items():
            ids = list(dict.fromkeys(one.id for one in admissions if one.owner == owner))
            body = msgspec.json.encode({"ids": ids, "return_partial": True})
            headers = [*first.headers(), ("content-type", "application/json")]
            try:
                async with context.services.fleet.remote(id).request("POST", ABORTS_PATH, headers, body) as response:
                    rows += _aborts_in(response.status, await response.whole(ANSWER_BYTES_MAX) or b"")
            except (EndpointLost, InvalidRequest):
                continue
    return rows


def _aborts_in(status: int, body: bytes) -> list[_Aborted]:
    if status != 200:
        return []
    try:
        return msgspec.json.decode(body, type=_Aborts).data
    except msgspec.DecodeError:
        return []


# A hand-over takes a step and its report. Meanwhile, the stream continues at the old endpoint.
HAND_OVER_SECONDS_MAX = 5.0
RESPONSE_BYTES_MAX = 64 * 1024


async def hand_over(remote: RemoteEndpoint, admission: AdmissionScope) -> None:
    """Ask an endpoint to hand over a request, and end the attempt there.

    The endpoint normally ends the stream, and the attempt ends with the stream. Otherwise, the router withdraws the
    request from the endpoint. The function returns when the attempt or the request has ended.

    Args:
        remote: Endpoint that runs the request.
        admission: Admission of the request. Its id is not None.
    """
    assert admission.id is not None
    attempt = admission.attempts
    with trio.move_on_after(HAND_OVER_SECONDS_MAX):
        path = f"/v1/requests/{quote(admission.id, safe='')}/hand-over"
        if await _is_handed_over(remote, path, admission.headers()):
            await admission.wait_for_end(attempt)
    if admission.attempts == attempt:
        admission.withdraw()


async def _is_handed_over(remote: RemoteEndpoint, path: str, headers: list[tuple[str, str]]) -> bool:
    try:
        async with remote.request("POST", path, headers, b"") as response:
            await response.whole(RESPONSE_BYTES_MAX)
            return response.status < 300
    except (EndpointLost, InvalidRequest):
        return False
