"""Operations of the Responses API."""

from __future__ import annotations

from trioserve.api.responses.handlers import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    read_response,
    serve_connection,
)
from trioserve.api.responses.request_types import RESPONSES_REFUSED, InputTokensBody, ResponsesBody
from trioserve.api.responses.response_types import (
    DeletedResponse,
    InputTokens,
    ResponseEvent,
    ResponseItems,
    ResponseObject,
)
from trioserve.api.route_table import GENERATES, READS_BODY, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = ["OPERATIONS"]


ID = "the response's id"
STORED = (401, 404, 500)
RANGES = {name: allowed for name, allowed in SAMPLING_RANGES.items() if name in ResponsesBody.__struct_fields__} | {
    "max_output_tokens": Range(1, None),
    "max_tool_calls": Range(1, None),
    "thinking_token_budget": Range(0, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    Operation(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        summary="Respond to items, in the shape of OpenAI's Responses API",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have OpenAI's meaning. Fields that are not listed here are ignored or refused. The "
        "response is stored unless store is false. Tools that a server would have to run, such as web_search, are "
        "ignored.",
        body=ResponsesBody,
        ranges=RANGES,
        refused=RESPONSES_REFUSED,
        response=ResponseObject,
        named_events=(ResponseEvent,),
        errors=(*GENERATES, 507),
        takes_deadlines=True,
    ),
    Operation(
        method="GET",
        path="/v1/responses",
        handler=serve_connection,
        summary="Open a websocket on which a client creates responses",
        description="Each message of the client is JSON of the type response.create, response.cancel or "
        "response.steer. Each message of the server is an event of a response, or an error.",
        errors=(400, 426, 429, 503),
        is_websocket=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        summary="Count the tokens of a response's input",
        forwarding=Forwarding.BY_MODEL,
        body=InputTokensBody,
        refused=RESPONSES_REFUSED,
        response=InputTokens,
        errors=(*READS_BODY, 404, 500),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}",
        handler=read_response,
        summary="Read a stored response or a running background response",
        forwarding=Forwarding.KEPT,
        description="With stream=true, the events of a response that was created with background and stream.",
        response=ResponseObject,
        query={
            "stream": ("send the events instead of the response", {"type": "boolean"}),
            "starting_after": ("send only events after the event with this number", {"type": "integer", "minimum": 0}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response}",
        handler=delete_response,
        summary="Delete a response",
        forwarding=Forwarding.KEPT,
        description="A running background response is cancelled first.",
        response=DeletedResponse,
        errors=(400, *STORED, 507),
        path_parameter=ID,
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response}/cancel",
        handler=cancel_response,
        summary="Cancel a background response",
        forwarding=Forwarding.KEPT,
        description="Its blocks are free at the next step. A response that has ended does not change.",
        response=ResponseObject,
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}/input_items",
        handler=list_input_items,
        summary="List the items of a response's own input",
        forwarding=Forwarding.KEPT,
        response=ResponseItems,
        query={
            "limit": ("number of items on a page", {"type": "integer", "minimum": 1, "maximum": 100}),
            "order": ("desc: last item first; asc: first item first", {"enum": ["desc", "asc"]}),
            "after": ("send only items after the item with this id", {"type": "string"}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
)
