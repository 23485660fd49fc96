"""Requests about what an endpoint keeps: they go to the endpoint that has it, without a place in the queue or a lease,
since nothing is computed for them.

Where it is, the router knows if it was made through it; otherwise the endpoints are asked in turn. But where callers
are told apart by keys of the router's own, what it has not seen being made is nobody's: an endpoint could not tell.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.caller import CallerKind
from trioserve.api.error_responses import REASON_HEADER, Refusal, refusal
from trioserve.api.openai.request_types import decode_body
from trioserve.api.operations.hand_over import HAND_OVER
from trioserve.api.operations.live_requests import REQUEST_PATH
from trioserve.api.responses.input_items import is_reference
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest, NoEndpoint
from trioserve.proxy.forwarded_headers import owner_of, request_headers, response_headers, session_told
from trioserve.proxy.kept_objects import KeptObject, may_be_id, object_id_in
from trioserve.proxy.relay import RESPONSES_PATH
from trioserve.proxy.response_shape import InvalidAnswer

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "MESSAGE_BATCHES_PATH",
    "check_references",
    "endpoint_of_response",
    "forward_anywhere",
    "forward_batch",
    "forward_control",
    "forward_home",
    "forward_kept",
    "forward_stream",
]

WHOLE_BYTES_MAX = 256 * 1024
MESSAGE_BATCHES_PATH = "/v1/messages/batches"


class _Batch(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str | None = None


class _Input(msgspec.Struct, frozen=True):
    input: Any = None


async def forward_kept(context: RouterContext) -> None:
    """To the endpoint that has the object whose id stands in the path."""
    body = await context.exchange.body()
    path = context.exchange.path
    id = path.removeprefix(MESSAGE_BATCHES_PATH + "/").split("/")[0]
    if not path.startswith(MESSAGE_BATCHES_PATH):
        id = path.split("/")[3]
    kept = await _known(context, id)
    if kept is None:
        await _ask_all(context, id, body)
    else:
        await _relay(context, kept.endpoint, body)


async def forward_home(context: RouterContext) -> None:
    """Files and batches of one caller lie at one endpoint, as long as the same endpoints are there."""
    if context.exchange.method == "GET" and _cannot_be_told_apart(context):
        raise refusal(
            "not_supported", "this router's endpoints cannot tell its callers apart, so it lists nothing: ask by id"
        )
    await _relay(context, _home(context), await context.exchange.body())


async def forward_batch(context: RouterContext) -> None:
    """To the endpoint that has the batch's file; lists as forward_home. Raises InvalidRequest for a batch whose lines
    may name what is stored, where an endpoint would give anybody's."""
    if context.exchange.method == "GET":
        await forward_home(context)
        return
    body = await context.exchange.body()
    batch = decode_body(body, _Batch)
    if batch.endpoint == RESPONSES_PATH and _cannot_be_told_apart(context):
        raise InvalidRequest(
            f'endpoint is "{RESPONSES_PATH}", whose lines may name stored responses, and behind this router nobody can '
            'tell whose they are: send a batch of "/v1/chat/completions"',
            param="endpoint",
        )
    await _relay(context, await _located(context, batch.input_file_id, "/v1/files/"), body)


async def forward_stream(context: RouterContext) -> None:
    """To whichever endpoint has a stream of this name; other callers' streams have other names there."""
    name = context.exchange.path.split("/")[3]
    context.path_told = f"/v1/streams/{session_told(context, name)}"
    await _ask_all(context, name, await context.exchange.body(), names_are_told=True)


async def forward_control(context: RouterContext) -> None:
    """To the endpoint where the request is. To give it away is the router's own wish alone: an endpoint that does so is
    taken for one that leaves, and gets nothing for a while."""
    id = context.exchange.path.removeprefix(REQUEST_PATH)
    if id.endswith(HAND_OVER):
        raise refusal("not_found", "a router gives requests away by itself: drain their endpoint with move=true")
    body = await context.exchange.body()
    for admission in context.fleet.dispatch.live_admissions(owner=context.owner):
        if admission.id == id and not admission.is_queued and admission.endpoint is not None:
            if await _relay(context, admission.endpoint, body) < 300:
                admission.note_reasoning_ended()  # another endpoint that goes on is to know
            return
    raise refusal("request_not_found", f'there is no request with the id "{id}" that runs')


async def forward_anywhere(context: RouterContext) -> None:
    """To any endpoint that serves the model, which stands in the query, if it is not the only one."""
    model = context.fleet.real_model(context.query("model"))
    for state in context.fleet.dispatch.endpoints:
        if model in state.models and state.accepts_requests:
            await _relay(context, state.id, b"")
            return
    raise NoEndpoint(
        f'no endpoint that serves "{model}" can be asked now: try again in 1 s',
        reason="no_endpoint",
        retry_after_seconds=1,
    )


async def endpoint_of_response(context: RouterContext, id: str) -> EndpointId:
    """Who has the response that another one goes on from. Raises Refusal (404)."""
    return await _located(context, id, "/v1/responses/")


# --- inside ---


async def _known(context: RouterContext, id: str) -> KeptObject | None:
    """None: it may be anywhere. Raises Refusal (404) if it is another's, or nobody can say whose."""
    kept = context.kept.find(id)
    if kept is None:
        kept = await context.processes.find_kept(id)
        if kept is not None:
            context.kept.remember(id, kept)
    if kept is not None and context.owner is not None and kept.owner != owner_of(context):
        raise _nothing(id)
    if kept is None and _cannot_be_told_apart(context):
        raise _nothing(id)
    if kept is not None and kept.endpoint not in context.fleet.specs():
        return None  # it has left; what it kept may be elsewhere now
    return kept


def _cannot_be_told_apart(context: RouterContext) -> bool:
    """Whether an endpoint cannot tell this caller from others: they have keys of the router's alone."""
    is_everybody = context.owner is None or context.caller.kind is CallerKind.ADMIN
    return not is_everybody and not context.rules.passes_authorization


async def _located(context: RouterContext, id: str, path: str) -> EndpointId:
    if not may_be_id(id):  # from a body: it would be anything in a path
        raise _nothing(id)
    kept = await _known(context, id)
    if kept is not None:
        return kept.endpoint
    for candidate in _candidates(context):
        try:
            async with context.fleet.remote(candidate).request(
                "GET", path + id, request_headers(context, None, with_body=False), b""
            ) as response:
                _check_is_no_page(candidate, response)
                if response.status < 400:
                    context.kept.remember(id, KeptObject(candidate, owner_of(context)))
                    return candidate
        except EndpointLost:
            continue
    raise _nothing(id)


async def _ask_all(context: RouterContext, id: str, body: bytes, *, names_are_told: bool = False) -> None:
    """The first one that does not say 404 has it."""
    lost: EndpointLost | None = None
    for candidate in _candidates(context):
        try:
            status = await _relay(context, candidate, body, gives_up_at_404=True)
            if status != 404:
                if status < 400 and not names_are_told:  # an error does not say that it is there
                    context.kept.remember(id, KeptObject(candidate, owner_of(context)))
                return
        except EndpointLost as error:
            if context.exchange.started:
                raise
            lost = error
    if lost is not None:
        raise NoEndpoint(
            f'"{id}" is not at any endpoint that can be reached, but one cannot: try again later',
            reason="no_endpoint",
            retry_after_seconds=5,
        )
    raise _nothing(id)


def _candidates(context: RouterContext) -> list[EndpointId]:
    return [state.id for state in context.fleet.dispatch.endpoints]


def _home(context: RouterContext) -> EndpointId:
    """By rendezvous hashing: an endpoint that comes or goes moves only those that are, or were, at home there."""
    usable = [state.id for state in context.fleet.dispatch.endpoints if state.accepts_requests]
    if not usable:
        raise NoEndpoint("no endpoint can be asked now: try again in 1 s", reason="no_endpoint", retry_after_seconds=1)
    name = (owner_of(context) or "").encode("utf-8", "surrogatepass")
    return max(usable, key=lambda id: blake2b(id.encode(), key=blake2b(name, digest_size=32).digest()).digest())


async def _relay(context: RouterContext, id: EndpointId, body: bytes, *, gives_up_at_404: bool = False) -> int:
    """Send the request there and the response to the client; its status. gives_up_at_404: that the client is not told.
    Raises EndpointLost."""
    context.endpoint = id
    request = context.fleet.remote(id).request(
        context.exchange.method, context.target, request_headers(context, None), body
    )
    async with request as response:
        _check_is_no_page(id, response)
        if response.status == 404 and gives_up_at_404:
            return 404
        await _pass_on(context, response, id)
        return response.status


def _check_is_no_page(id: EndpointId, response: RemoteResponse) -> None:
    """Raises InvalidAnswer for a web page or a redirect: no endpoint answers so, but for files that are pages."""
    kind = (response.header("content-type") or "").lower()
    is_file = response.header("content-disposition") is not None
    if 300 <= response.status < 400 or (kind.startswith("text/html") and not is_file):
        raise InvalidAnswer(id, "html", f"status {response.status} of the type {kind[:80]!r}")


async def _pass_on(context: RouterContext, response: RemoteResponse, id: EndpointId) -> None:
    is_events = (response.header("content-type") or "").startswith("text/event-stream")
    whole = None if is_events else await response.whole(WHOLE_BYTES_MAX)
    if whole is not None:
        if context.exchange.method == "POST" and response.status < 300 and (made := object_id_in(whole)):
            context.kept.remember(made, KeptObject(id, owner_of(context)))
        if response.status >= 400:
            context.note_error(response.status, response.header(REASON_HEADER))
        await context.respond(response.status, response_headers(context, response), whole)
        return
    await context.start(response.status, response_headers(context, response), is_events=is_events)
    while (piece := await response.next_piece()) is not None:
        await context.exchange.send(piece)
    await context.finish()


def _nothing(id: str) -> Refusal:
    return refusal("not_found", f'there is nothing with the id "{id[:160]}" here')


def check_references(context: RouterContext, raw: bytes) -> None:
    """Items of stored responses may be named in a new request, and an endpoint that cannot tell callers apart would
    give anybody's. Raises InvalidRequest."""
    if not _cannot_be_told_apart(context):
        return
    items = decode_body(raw, _Input).input
    if isinstance(items, list) and any(isinstance(item, dict) and is_reference(item) for item in items):
        raise InvalidRequest(
            "input names stored items (item_reference), and behind this router nobody can tell whose they are: send "
            "the items themselves, or previous_response_id",
            param="input",
        )
