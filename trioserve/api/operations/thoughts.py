"""POST /v1/requests/{id} with {"end_thinking": true}: the thought of a request ends while it is written.

With API keys a key controls the requests that it made, and an admin key all of them; the ids of others are unknown.
"""

from __future__ import annotations

from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import ControlBody
from trioserve.api.operations.live_requests import REQUEST_PATH, unknown_request
from trioserve.api.request_context import RequestContext
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.thinking import ThoughtOutcome

__all__ = ["control_request"]


async def control_request(context: RequestContext) -> None:
    """Responds with 200 when the end of the thought comes next; 404 if no request of this caller bears the id, 409 if
    it has no thought that could end."""
    body = await context.body(ControlBody)
    if body.end_thinking is not True:
        raise InvalidRequest(
            'nothing is asked of the request: send {"end_thinking": true}, or DELETE to abort it', param="end_thinking"
        )
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.end_thoughts([request_id], owner=context.owner)[request_id]
    if outcome is ThoughtOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is ThoughtOutcome.NO_THOUGHT:
        raise refusal(
            "no_thought",
            f"the request {request_id!r} has no thought that could end: its model writes none, or it is "
            "through with it",
        )
    await context.respond_json({"id": request_id, "object": "request.control", "result": outcome.value})
