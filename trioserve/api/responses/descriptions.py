"""What each path of the Responses API does and may answer: for the API's own description."""

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
        description="Fields, and their meanings, are OpenAI's. Fields that are not named here are ignored or "
        "refused. A response "
        "is stored unless store is false. Tools that a server would have to run, such as web_search, are left out.",
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
        summary="Read a response that was stored, or that lives in the background",
        description="Of one that was made with background and stream, stream=true gives the events.",
        response=response_types.ResponseObject,
        query={
            "stream": ("its events instead", {"type": "boolean"}),
            "starting_after": ("only the events behind the one with this number", {"type": "integer", "minimum": 0}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    ("DELETE", "/v1/responses/{response}"): DescribedOperation(
        summary="Delete a response",
        description="One that lives in the background is ended first.",
        response=response_types.DeletedResponse,
        errors=(400, *STORED, 507),
        path_parameter=ID,
    ),
    ("POST", "/v1/responses/{response}/cancel"): DescribedOperation(
        summary="Cancel a background response",
        description="Its blocks are free with the next step. One that is over stays as it is.",
        response=response_types.ResponseObject,
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    ("GET", "/v1/responses/{response}/input_items"): DescribedOperation(
        summary="List the items of a response's own input",
        response=response_types.ResponseItems,
        query={
            "limit": ("items of a page", {"type": "integer", "minimum": 1, "maximum": 100}),
            "order": ("the last one first, or the first one", {"enum": ["desc", "asc"]}),
            "after": ("only the items behind the one with this id", {"type": "string"}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
}
