"""Requests that are forwarded without a lease: about stored responses, files and batches, and about running requests.

They do not wait in the queue, because they compute nothing. The router knows the endpoint of an object whose creation
it has seen. Otherwise it asks the endpoints in turn. However, if the router has keys of its own for its callers,
objects with unknown owners are hidden: an endpoint could not check the owner.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.caller import CallerKind
from trioserve.api.error_responses import REASON_HEADER, Refusal, refusal
from trioserve.api.openai.request_types import decode_body
from trioserve.api.operations.live_requests import HAND_OVER, REQUEST_PATH
from trioserve.api.responses.input_items import is_reference
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest, NoEndpoint
from trioserve.proxy.peers.processes import RESPONSES_PATH, KeptObject, may_be_id, object_id_in
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.proxy.routed_body import rewritten
from trioserve.proxy.router_context import endpoint_session, owner_of, request_headers, response_headers

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = [
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
    """Forward a request to the endpoint that stores the object in the path.

    Args:
        context: Request of the router's API.
    """
    body = await context.exchange.body()
    path = context.exchange.path
    id = path.removeprefix(MESSAGE_BATCHES_PATH + "/").split("/")[0]
    if not path.startswith(MESSAGE_BATCHES_PATH):
        id = path.split("/")[3]
    kept = await _known_object(context, id)
    if kept is None:
        await _ask_all(context, id, body)
    else:
        shows_response = context.exchange.method == "GET" and path == f"{RESPONSES_PATH}/{id}"
        previous = kept.previous_response_id if shows_response else None
        await _relay(context, kept.endpoint, body, previous_response_id=previous)


async def forward_home(context: RouterContext) -> None:
    """Forward a request about files or batches to the caller's home endpoint.

    All files and batches of a caller are stored at one endpoint, as long as the set of endpoints does not change.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: The request asks for a list, and the endpoints cannot distinguish callers.
    """
    if context.exchange.method == "GET" and _is_unknown_to_endpoints(context):
        raise refusal(
            "not_supported", "this router's endpoints cannot distinguish its callers, so it lists nothing: ask by id"
        )
    await _relay(context, _home_endpoint(context), await context.exchange.body())


async def forward_batch(context: RouterContext) -> None:
    """Forward a new batch to the endpoint that stores its input file. Other requests go to the caller's home endpoint.

    Args:
        context: Request of the router's API.

    Raises:
        InvalidRequest: The lines of the batch may name stored responses, and the endpoints cannot check their owners.
    """
    if context.exchange.method == "GET":
        await forward_home(context)
        return
    body = await context.exchange.body()
    batch = decode_body(body, _Batch)
    if batch.endpoint == RESPONSES_PATH and _is_unknown_to_endpoints(context):
        raise InvalidRequest(
            f'endpoint is "{RESPONSES_PATH}", whose lines may name stored responses, and the endpoints of this router '
            'cannot check who owns them: send a batch of "/v1/chat/completions"',
            param="endpoint",
        )
    await _relay(context, await _endpoint_of(context, batch.input_file_id, "/v1/files/"), body)


async def forward_stream(context: RouterContext) -> None:
    """Forward a request about a named stream or session to the endpoint that has it.

    Streams and sessions of different callers have different names at endpoints.

    Args:
        context: Request of the router's API.
    """
    _, version, kind, name = context.exchange.path.split("/", 3)
    context.endpoint_path = f"/{version}/{kind}/{endpoint_session(context, name)}"
    await _ask_all(context, name, await context.exchange.body(), has_endpoint_name=True)


async def forward_control(context: RouterContext) -> None:
    """Forward a control request to the endpoint that runs the controlled request.

    Clients cannot hand over requests. The router treats an endpoint that hands over a request as leaving, and sends no
    new requests there for a while. So only the router may request a hand-over.

    Args:
        context: Request of the router's API.

    Raises:
        Refusal: The request does not run, or the client asks for a hand-over.
    """
    id = context.exchange.path.removeprefix(REQUEST_PATH)
    if id.endswith(HAND_OVER):
        raise refusal("not_found", "only the router hands over requests: drain their endpoint with move=true")
    body = await context.exchange.body()
    for admission in context.services.fleet.dispatch.live_admissions(owner=context.owner):
        if admission.id == id and not admission.is_queued and admission.endpoint is not None:
            if await _relay(context, admission.endpoint, body) < 300:
                # An endpoint that later resumes the response must get this information.
                admission.note_reasoning_ended()
            return
    raise refusal("request_not_found", f'no running request has the id "{id}"')


async def forward_anywhere(context: RouterContext) -> None:
    """Forward a request to any endpoint that serves the model in the query.

    Args:
        context: Request of the router's API. It may omit the model if there is only one.

    Raises:
        NoEndpoint: No endpoint with the model accepts requests now.
    """
    model = context.services.fleet.real_model(context.query("model"))
    for state in context.services.fleet.dispatch.endpoints:
        if model in state.models and state.accepts_requests:
            await _relay(context, state.id, b"")
            return
    raise NoEndpoint(
        f'no endpoint that serves "{model}" accepts requests now: try again in 1 s',
        reason="no_endpoint",
        retry_after_seconds=1,
    )


async def endpoint_of_response(context: RouterContext, id: str) -> EndpointId:
    """Find the endpoint that stores a response which a new request continues.

    Args:
        context: Request that continues the response.
        id: Id of the stored response.

    Raises:
        Refusal: No endpoint has the response, or another caller owns it (404).
    """
    return await _endpoint_of(context, id, "/v1/responses/")


# --- private functions ---


async def _known_object(context: RouterContext, id: str) -> KeptObject | None:
    """Look up a stored object in this process and in the router's other processes.

    Returns:
        The object, or None if any endpoint may store it.

    Raises:
        Refusal: Another caller owns the object, or its owner is unknown (404).
    """
    kept = context.services.kept.find(id)
    if kept is None:
        kept = await context.services.processes.find_kept(id)
        if kept is not None:
            context.services.kept.remember(id, kept)
    if kept is not None and context.owner is not None and kept.owner != owner_of(context):
        raise _not_found(id)
    if kept is None and _is_unknown_to_endpoints(context):
        raise _not_found(id)
    if kept is not None and kept.endpoint not in context.services.fleet.specs():
        return None  # The endpoint has left the fleet. Another endpoint may store its objects now.
    return kept


def _is_unknown_to_endpoints(context: RouterContext) -> bool:
    """Return True if endpoints cannot distinguish this caller from other callers, because only the router knows the
    caller's key.
    """
    is_everybody = context.owner is None or context.caller.kind is CallerKind.ADMIN
    return not is_everybody and not context.services.rules.passes_authorization


async def _endpoint_of(context: RouterContext, id: str, path: str) -> EndpointId:
    if not may_be_id(id):  # The id may come from a body. An invalid id could change the path of the request.
        raise _not_found(id)
    kept = await _known_object(context, id)
    if kept is not None:
        return kept.endpoint
    for candidate in _candidates(context):
        try:
            async with context.services.fleet.remote(candidate).request(
                "GET", path + id, request_headers(context, None, with_body=False), b""
            ) as response:
                _check_is_no_page(candidate, response)
                if response.status < 400:
                    context.services.kept.remember(id, KeptObject(candidate, owner_of(context)))
                    return candidate
        except EndpointLost:
            continue
    raise _not_found(id)


async def _ask_all(context: RouterContext, id: str, body: bytes, *, has_endpoint_name: bool = False) -> None:
    """Send the request to one endpoint after another, until an endpoint answers with another status than 404."""
    lost: EndpointLost | None = None
    for candidate in _candidates(context):
        try:
            status = await _relay(context, candidate, body, gives_up_at_404=True)
            if status != 404:
                if status < 400 and not has_endpoint_name:
                    # An error does not prove that the endpoint stores the object.
                    context.services.kept.remember(id, KeptObject(candidate, owner_of(context)))
                return
        except EndpointLost as error:
            if context.exchange.started:
                raise
            lost = error
    if lost is not None:
        raise NoEndpoint(
            f'no reachable endpoint has "{id}", but an endpoint cannot be reached: try again later',
            reason="no_endpoint",
            retry_after_seconds=5,
        )
    raise _not_found(id)


def _candidates(context: RouterContext) -> list[EndpointId]:
    return [state.id for state in context.services.fleet.dispatch.endpoints]


def _home_endpoint(context: RouterContext) -> EndpointId:
    """Choose the caller's home endpoint by rendezvous hashing.

    When an endpoint joins or leaves the fleet, only the callers of this endpoint get another home endpoint.
    """
    usable = [state.id for state in context.services.fleet.dispatch.endpoints if state.accepts_requests]
    if not usable:
        raise NoEndpoint("no endpoint accepts requests: try again in 1 s", reason="no_endpoint", retry_after_seconds=1)
    name = (owner_of(context) or "").encode("utf-8", "surrogatepass")
    return max(usable, key=lambda id: blake2b(id.encode(), key=blake2b(name, digest_size=32).digest()).digest())


async def _relay(
    context: RouterContext,
    id: EndpointId,
    body: bytes,
    *,
    gives_up_at_404: bool = False,
    previous_response_id: str | None = None,
) -> int:
    """Forward the request to an endpoint, and its response to the client.

    Args:
        context: Request of the router's API.
        id: Endpoint that gets the request.
        body: Body of the request.
        gives_up_at_404: Whether a response with status 404 is dropped instead of sent to the client.
        previous_response_id: Value for this field of the response. None: the field stays unchanged.

    Returns:
        Status of the response.

    Raises:
        EndpointLost: The endpoint did not answer, or the connection broke.
    """
    context.endpoint = id
    request = context.services.fleet.remote(id).request(
        context.exchange.method, context.target, request_headers(context, None), body
    )
    async with request as response:
        _check_is_no_page(id, response)
        if response.status == 404 and gives_up_at_404:
            return 404
        await _pass_on(context, response, id, previous_response_id)
        return response.status


def _check_is_no_page(id: EndpointId, response: RemoteResponse) -> None:
    """Reject web pages and redirects. An endpoint never sends them, except for a stored file that is a page.

    Raises:
        InvalidAnswer: The response is a page or a redirect.
    """
    kind = (response.header("content-type") or "").lower()
    is_file = response.header("content-disposition") is not None
    if 300 <= response.status < 400 or (kind.startswith("text/html") and not is_file):
        raise InvalidAnswer(id, "html", f"status {response.status} of the type {kind[:80]!r}")


async def _pass_on(
    context: RouterContext, response: RemoteResponse, id: EndpointId, previous_response_id: str | None
) -> None:
    is_events = (response.header("content-type") or "").startswith("text/event-stream")
    whole = None if is_events else await response.whole(WHOLE_BYTES_MAX)
    if whole is not None:
        if context.exchange.method == "POST" and response.status < 300 and (made := object_id_in(whole)):
            context.services.kept.remember(made, KeptObject(id, owner_of(context)))
        if response.status >= 400:
            context.note_error(response.status, response.header(REASON_HEADER))
        elif previous_response_id is not None:
            whole = rewritten(whole, {"previous_response_id": previous_response_id})
        await context.respond(response.status, response_headers(context, response), whole)
        return
    await context.start(response.status, response_headers(context, response), is_events=is_events)
    while (piece := await response.next_piece()) is not None:
        await context.exchange.send(piece)
    await context.finish()


def _not_found(id: str) -> Refusal:
    return refusal("not_found", f'there is nothing with the id "{id[:160]}" here')


def check_references(context: RouterContext, raw: bytes) -> None:
    """Reject references to stored items if the endpoints cannot check the owner.

    Args:
        context: Request of the router's API.
        raw: Body of the request.

    Raises:
        InvalidRequest: The input contains references, and the endpoints cannot distinguish callers.
    """
    if not _is_unknown_to_endpoints(context):
        return
    items = decode_body(raw, _Input).input
    if isinstance(items, list) and any(isinstance(item, dict) and is_reference(item) for item in items):
        raise InvalidRequest(
            "input names stored items (item_reference), and the endpoints of this router cannot check who owns them: "
            "send the items themselves, or previous_response_id",
            param="input",
        )
