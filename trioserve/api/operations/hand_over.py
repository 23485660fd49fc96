"""POST /v1/requests/{id}/hand-over: a stream is given away, for another server to go on with.

It ends behind a last whole group, and says how its KV can be fetched. So a router moves it without computing anything
again. With API keys a key gives away the requests that it made, and an admin key all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import HandedOver, refusal
from trioserve.api.operations.live_requests import REQUEST_PATH, unknown_request
from trioserve.api.sse import encode
from trioserve.contracts.events import HandOverOutcome

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["HAND_OVER", "HAND_OVER_PATH", "give_away", "hand_over_event"]

HAND_OVER = "/hand-over"
HAND_OVER_PATH = REQUEST_PATH + "{request}" + HAND_OVER
GIVEN_AWAY_ID = b"id: >"


async def give_away(context: RequestContext) -> None:
    """Responds with 200 when its stream is about to end; 404 if no request of this caller bears the id, 409 if nobody
    could go on with it."""
    request_id = context.exchange.path.removeprefix(REQUEST_PATH).removesuffix(HAND_OVER)
    outcome = context.engine.hand_over([request_id], owner=context.owner)[request_id]
    if outcome is HandOverOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is HandOverOutcome.NOT_POSSIBLE:
        raise refusal(
            "no_hand_over",
            f"the request {request_id!r} cannot be given away: it does not run at this moment, or it is no "
            "stream that was asked for with X-Trioserve-Resumable",
        )
    await context.respond_json({"id": request_id, "object": "request.hand_over", "result": outcome.value})


def hand_over_event(handed: HandedOver) -> bytes:
    """The last of a stream that was given away."""
    said = encode({"object": "hand_over", "kv_transfer_params": handed.kv_transfer})
    return b"data: %b\n%b\n\n" % (said, GIVEN_AWAY_ID)
