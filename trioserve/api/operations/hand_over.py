"""POST /v1/requests/{id}/hand-over: ends a stream here, so that another server can continue it.

The stream ends after a complete group of events, and its last event says how to fetch its KV. So a router can move the
stream without recomputation. With API keys, a key can hand over its own requests, and the admin's key all requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import HandedOver, refusal
from trioserve.api.openai import response_types
from trioserve.api.operations.live_requests import REQUEST_PATH, unknown_request
from trioserve.api.route_table import Operation
from trioserve.api.sse import encode
from trioserve.contracts.events import HandOverOutcome

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["HAND_OVER", "HAND_OVER_PATH", "OPERATIONS", "hand_over_event", "hand_over_stream"]

HAND_OVER = "/hand-over"
HAND_OVER_PATH = REQUEST_PATH + "{request}" + HAND_OVER
HANDED_OVER_ID = b"id: >"


async def hand_over_stream(context: RequestContext) -> None:
    """Hand a stream over. Responds when the stream is about to end.

    Args:
        context: the request.

    Raises:
        Refusal: the caller has no request with this id (404), or the request cannot be continued elsewhere (409).
    """
    request_id = context.exchange.path.removeprefix(REQUEST_PATH).removesuffix(HAND_OVER)
    outcome = context.engine.hand_over([request_id], owner=context.owner)[request_id]
    if outcome is HandOverOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is HandOverOutcome.NOT_POSSIBLE:
        raise refusal(
            "no_hand_over",
            f"the request {request_id!r} cannot be handed over: it does not run at this moment, or it is not a "
            "stream that was requested with X-Trioserve-Resumable",
        )
    await context.respond_json({"id": request_id, "object": "request.hand_over", "result": outcome.value})


def hand_over_event(handed: HandedOver) -> bytes:
    """Make the last event of a stream that was handed over.

    Args:
        handed: how another server fetches the KV.
    """
    event = encode({"object": "hand_over", "kv_transfer_params": handed.kv_transfer})
    return b"data: %b\n%b\n\n" % (event, HANDED_OVER_ID)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/requests/{request}/hand-over",
        handler=hand_over_stream,
        summary="Hand a stream over to another server",
        id_has_slashes=True,
        description="The stream ends after the step in flight at the latest, with a last complete group. If a "
        "connector holds its KV, an event then says how to fetch it. Only running streams that were requested with "
        "X-Trioserve-Resumable can be handed over; 409 otherwise.",
        response=response_types.RequestHandOver,
        errors=(400, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
)
