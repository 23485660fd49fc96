"""Descriptions of the operations of the Responses API, for the OpenAPI document."""

from __future__ import annotations

from trioserve.api.described_operation import GENERATES, READS_BODY, DescribedOperation
from trioserve.api.responses import response_types
from trioserve.api.responses.request_types import RESPONSES_REFUSED, InputTokensBody, ResponsesBody
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = ["OPERATIONS"]

ID = "the response's id"
STORED = (401, 404, 500)
RANGES = {
    name: SAMPLING_RANGES[name]
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "logit_bias",
    )
} | {
    "max_output_tokens": Range(1, None),
    "max_tool_calls": Range(1, None),
    "thinking_token_budget": Range(0, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/responses"): DescribedOperation(
        summary="Respond to items, in the shape of OpenAI's Responses API",
        description="Fields have OpenAI's meaning. Fields that are not listed here are ignored or refused. The "
        "response is stored unless store is false. Tools that a server would have to run, such as web_search, are "
        "ignored.",
        body=ResponsesBody,
        ranges=RANGES,
        refused=RESPONSES_REFUSED,
        response=response_types.ResponseObject,
        named_events=(response_types.ResponseEvent,),
        errors=(*GENERATES, 507),
        takes_deadlines=True,
    ),
    ("POST", "/v1/responses/input_tokens"): DescribedOperation(
        summary="Count the tokens of a response's input",
        body=InputTokensBody,
        refused=RESPONSES_REFUSED,
        response=response_types.InputTokens,
        errors=(*READS_BODY, 404, 500),
    ),
    ("GET", "/v1/responses/{response}"): DescribedOperation(
        summary="Read a stored response or a running background response",
        description="With stream=true, the events of a response that was created with background and stream.",
        response=response_types.ResponseObject,
        query={
            "stream": ("send the events instead of the response", {"type": "boolean"}),
            "starting_after": ("send only events after the event with this number", {"type": "integer", "minimum": 0}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    ("DELETE", "/v1/responses/{response}"): DescribedOperation(
        summary="Delete a response",
        description="A running background response is cancelled first.",
        response=response_types.DeletedResponse,
        errors=(400, *STORED, 507),
        path_parameter=ID,
    ),
    ("POST", "/v1/responses/{response}/cancel"): DescribedOperation(
        summary="Cancel a background response",
        description="Its blocks are free at the next step. A response that has ended does not change.",
        response=response_types.ResponseObject,
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    ("GET", "/v1/responses/{response}/input_items"): DescribedOperation(
        summary="List the items of a response's own input",
        response=response_types.ResponseItems,
        query={
            "limit": ("number of items on a page", {"type": "integer", "minimum": 1, "maximum": 100}),
            "order": ("desc: last item first; asc: first item first", {"enum": ["desc", "asc"]}),
            "after": ("send only items after the item with this id", {"type": "string"}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
}
