"""Running requests: list them, and abort them by id.

With API keys, a key sees and aborts its own requests only, and the admin's key all requests. Without keys, everybody
sees all requests.
"""

from __future__ import annotations

from trioserve.api.engine_context import EngineContext
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import AbortBody, decode_body
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.live import LiveRequestView

__all__ = [
    "OPERATIONS",
    "REQUEST_PATH",
    "abort_request",
    "abort_requests",
    "checked_ids",
    "list_requests",
    "respond_aborted",
    "unknown_request",
]

REQUEST_PATH = "/v1/requests/"
"""Path before a request's id, which may have slashes."""


ABORTS_MAX = 1000  # ids in one call. Each adds an entry to the response


async def list_requests(context: RequestContext) -> None:
    views = context.engine.live_requests(owner=context.owner)
    await context.respond_json({"object": "list", "data": [_shown(view) for view in views]})


async def abort_request(context: EngineContext) -> None:
    """Abort one request, and respond with the result.

    Args:
        context: the request.

    Raises:
        Refusal: the caller has no request with this id (404).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.abort([request_id], owner=context.owner)[request_id]
    if outcome is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json({"id": request_id, "object": "request.abort", "result": outcome.value})


def unknown_request(request_id: str) -> Refusal:
    """Make the error (404) for an id that no running request of the caller has.

    Args:
        request_id: the id.
    """
    return refusal(
        "request_not_found",
        f"no request with the id {request_id!r} is known; every response has its id in X-Request-Id",
    )


async def abort_requests(context: EngineContext) -> None:
    """Abort several requests. Responds with one result for each id, in the same order.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value, or asks for partial results.
    """
    body = decode_body(await context.exchange.body(), AbortBody)
    if body.return_partial:
        raise InvalidRequest(
            "return_partial is set, but this server has no partial results: send it to a text engine",
            param="return_partial",
        )
    await respond_aborted(context, body)


async def respond_aborted(context: EngineContext, body: AbortBody) -> None:
    """Abort requests, and respond without partial results.

    Args:
        context: the request.
        body: ids of the requests to abort.

    Raises:
        InvalidRequest: there are too many ids, or none.
    """
    outcomes = context.engine.abort(checked_ids(body.ids), owner=context.owner, min_age_seconds=body.min_age_seconds)
    await context.respond_json(
        {
            "object": "list",
            "data": [
                {"id": request_id, "object": "request.abort", "result": outcome.value}
                for request_id, outcome in outcomes.items()
            ],
        }
    )


def checked_ids(ids: list[str]) -> list[str]:
    """Check the number of ids.

    Args:
        ids: ids of requests.

    Raises:
        InvalidRequest: there are too many ids, or none.
    """
    if not 1 <= len(ids) <= ABORTS_MAX:
        raise InvalidRequest(f"ids has {len(ids)} entries, allowed are 1 to {ABORTS_MAX}", param="ids")
    return ids


def _shown(view: LiveRequestView) -> dict[str, object]:
    return {
        "id": view.id,
        "object": "request",
        "state": view.state,
        "phase": view.phase.value,
        "priority": view.priority,
        "age_seconds": round(view.age_seconds, 3),
        "prompt_tokens": view.prompt_token_count,
        "completion_tokens": view.completion_token_count,
        "blocks": view.block_count,
    }


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/v1/requests",
        handler=list_requests,
        summary="List running requests",
        is_operators=True,
        description="Lists the requests of the caller's key, or all requests with the admin's key or without keys. "
        "Includes finished requests whose blocks are held for another engine.",
        response=response_types.LiveRequests,
    ),
    Operation(
        method="DELETE",
        path="/v1/requests/{request}",
        handler=abort_request,
        summary="Abort a request",
        id_has_slashes=True,
        description="Its blocks are free after the next step. A streaming client gets an error event. If the request "
        "has finished and its blocks are held for another engine, they are released.",
        response=response_types.RequestAbort,
        errors=(400, 404),
        path_parameter="the request's X-Request-Id",
    ),
)
