"""POST /v1/requests/{id} with {"end_thinking": true}: ends the reasoning of a running request.

With API keys, a key controls its own requests only, and the admin's key all requests.
"""

from __future__ import annotations

from trioserve.api.error_responses import refusal
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import ControlBody
from trioserve.api.operations.live_requests import REQUEST_PATH, unknown_request
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.thinking import ReasoningOutcome

__all__ = ["OPERATIONS", "control_request"]


async def control_request(context: RequestContext) -> None:
    """End the reasoning of a request. Responds when the model is about to write the end of the reasoning.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body asks for nothing.
        Refusal: the caller has no request with this id (404), or the request has no reasoning to end (409).
    """
    body = await context.body(ControlBody)
    if body.end_thinking is not True:
        raise InvalidRequest(
            'the body asks for no change: send {"end_thinking": true}, or abort the request with DELETE',
            param="end_thinking",
        )
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.end_reasoning([request_id], owner=context.owner)[request_id]
    if outcome is ReasoningOutcome.UNKNOWN:
        raise unknown_request(request_id)
    if outcome is ReasoningOutcome.NO_REASONING:
        raise refusal(
            "no_thought",
            f"the request {request_id!r} has no reasoning to end: its model writes none, or the reasoning has "
            "ended already",
        )
    await context.respond_json({"id": request_id, "object": "request.control", "result": outcome.value})


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/requests/{request}",
        handler=control_request,
        summary="End the reasoning of a running request",
        id_has_slashes=True,
        description="The model continues after the end of the reasoning. 409 if the request has no reasoning to end.",
        body=ControlBody,
        response=response_types.RequestControl,
        errors=(*READS_BODY, 404, 409),
        path_parameter="the request's X-Request-Id",
    ),
)
