"""Requests that are ended by their ids, wherever they are: in the queue, at an endpoint, at another process of this
router.

Whoever wants to have what there is of a request gets it from the endpoint where it runs, which ends it and says so, to
its own client, too. One that does not answer in time is left by closing the connection, as in all other cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

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

__all__ = ["ABORTS_PATH", "abort_left", "abort_for_vllm", "abort_one_or_all", "abort_request", "abort_requests"]

ABORTS_PATH = "/v1/requests/abort"
OUTCOMES = (AbortOutcome.ABORTED, AbortOutcome.ALREADY_FINISHED, AbortOutcome.UNKNOWN)
ANSWER_SECONDS_MAX = 1.0  # an endpoint does not wait for its step; other processes of this router wait for ours
ANSWER_BYTES_MAX = 32 * 1024 * 1024


async def abort_request(context: RouterContext) -> None:
    """Answers 200 with what it did; 404 if no request of this caller bears the id."""
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    answers = await context.processes.ask(context)
    told = [msgspec.json.decode(answer.body, type=_Aborted) for answer in answers if answer.status == 200]
    ended = (await _everywhere(context, [request_id], told, with_partials=False))[request_id]
    if ended.result is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json({"id": request_id, "object": "request.abort", "result": ended.result.value})


async def abort_requests(context: RouterContext) -> None:
    """Answers with a result for each id, in the order in which they came."""
    raw = await context.exchange.body()
    body = decode_body(raw, AbortBody)
    if body.min_age_seconds:
        raise InvalidRequest(
            "min_age_seconds is set, and a router does not know it: leave it out", param="min_age_seconds"
        )
    ids = checked_ids(body.ids)
    await _respond(context, ids, await context.processes.ask(context, raw), with_partials=body.return_partial)


async def abort_one_or_all(context: RouterContext) -> None:
    """The same with SGLang's name, for one id or for all requests of the caller."""
    raw = await context.exchange.body()
    body = decode_body(raw, AbortRequestBody)
    if bool(body.rid) is body.abort_all:
        raise InvalidRequest("send either the id of a request as rid, or abort_all", param="rid")
    ids = _live_ids(context) if body.abort_all else [body.rid]
    await _respond(context, ids, await context.processes.ask(context, raw), with_partials=body.return_partial)


async def abort_for_vllm(context: RouterContext) -> None:
    """The same with vLLM's name; without ids, all requests of the caller."""
    raw = await context.exchange.body()
    ids = decode_body(raw, AbortRequestsBody).request_ids
    ids = checked_ids(ids) if ids else _live_ids(context)
    answers = await context.processes.ask(context, raw)
    ended = await _everywhere(context, ids, [], with_partials=False)
    count = sum(one.result is AbortOutcome.ABORTED for one in ended.values())
    count += sum(msgspec.json.decode(one.body, type=_Count).aborted for one in answers if one.status == 200)
    await context.respond_json({"status": "aborted", "aborted": count})


async def abort_left(remote: RemoteEndpoint, headers: list[tuple[str, str]], silent_seconds: float) -> None:
    """End a request at an endpoint whose connection was closed after a silence.

    What became silent may lose the close as well, and the request would run on for nobody. A new request with the same
    id, such as its own continuation, is younger than the silence, and goes on.

    Args:
        headers: of the request.
        silent_seconds: for how long nothing had come.
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
    """Of this caller. Raises Refusal (403) where it may not know them."""
    check_may_operate(context.caller)
    live = context.fleet.dispatch.live_admissions(owner=context.owner)
    return [admission.id for admission in live if admission.id is not None]


class _Count(msgspec.Struct):
    aborted: int


class _Aborted(msgspec.Struct):
    """partials: what there is of the requests of this id."""

    id: str
    result: AbortOutcome
    partials: list[msgspec.Raw] = []


class _Aborts(msgspec.Struct):
    data: list[_Aborted]


async def _respond(context: RouterContext, ids: list[str], answers: list[Answer], *, with_partials: bool) -> None:
    told = [one for answer in answers for one in _aborts_in(answer.status, answer.body)]
    ended = await _everywhere(context, ids, told, with_partials=with_partials)
    data: list[dict[str, object]] = []
    for id, one in ended.items():
        row: dict[str, object] = {"id": id, "object": "request.abort", "result": one.result.value}
        data.append({**row, "partials": one.partials} if with_partials else row)
    await context.respond_json({"object": "list", "data": data})


async def _everywhere(
    context: RouterContext, ids: Iterable[str], told: list[_Aborted], *, with_partials: bool
) -> dict[str, _Aborted]:
    """What came of each id: here, and in the other processes, which have told it. Where one id has several requests,
    each process ends its own, and one that was live is what counts."""
    ended = await _here(context, list(dict.fromkeys(ids)), with_partials=with_partials)
    for one in told:
        own = ended.setdefault(one.id, one)
        if own is not one:
            own.result = min(own.result, one.result, key=OUTCOMES.index)
            own.partials += one.partials
    return ended


async def _here(context: RouterContext, ids: list[str], *, with_partials: bool) -> dict[str, _Aborted]:
    dispatch, owner = context.fleet.dispatch, context.owner
    wanted = frozenset(ids)
    asked: dict[EndpointId, list[AdmissionScope]] = {}
    for admission in dispatch.live_admissions(owner=owner):
        if admission.id in wanted and _is_cut_off_there(admission, with_partials=with_partials):
            assert admission.endpoint is not None
            asked.setdefault(admission.endpoint, []).append(admission)
    ended: dict[str, _Aborted] = {}
    sure: set[int] = set()  # of these the endpoints have said that they are over

    async def ask(id: EndpointId, admissions: list[AdmissionScope]) -> None:
        for one in await _cut_off(context, id, admissions):
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
    finally:  # whoever asked for it may have left, and it is done all the same
        live = dispatch.live_admissions(owner=owner)
        left = {one.id for one in live if one.index not in sure and not one.is_ended}
        rest = dispatch.abort([id for id in ids if id in left or id not in ended], owner=owner)
    for id, outcome in rest.items():
        one = ended.setdefault(id, _Aborted(id, outcome))
        one.result = min(one.result, outcome, key=OUTCOMES.index)
    return {id: ended[id] for id in ids}


def _is_cut_off_there(admission: AdmissionScope, *, with_partials: bool) -> bool:
    """Whether its endpoint is asked to end it. Where its prompt is computed for another endpoint nothing of it has
    been said yet."""
    is_there = admission.endpoint is not None and not admission.is_queued and not admission.is_ended
    return is_there and admission.stage is not Stage.PREFILL and (with_partials or admission.gives_partial)


async def _cut_off(context: RouterContext, id: EndpointId, admissions: list[AdmissionScope]) -> list[_Aborted]:
    """What the endpoint says of these, of one caller each; nothing where it does not answer as ours do."""
    rows: list[_Aborted] = []
    owners = {admission.owner: admission for admission in admissions}
    with trio.move_on_after(ANSWER_SECONDS_MAX):
        for owner, first in owners.items():
            ids = list(dict.fromkeys(one.id for one in admissions if one.owner == owner))
            body = msgspec.json.encode({"ids": ids, "return_partial": True})
            headers = [*first.headers(), ("content-type", "application/json")]
            try:
                async with context.fleet.remote(id).request("POST", ABORTS_PATH, headers, body) as response:
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
