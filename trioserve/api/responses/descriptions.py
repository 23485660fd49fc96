"""Operations of the Responses API and the types of everything that it sends, for the OpenAPI document and for tests.

The server does not build responses from these types (see events.py). Tests check that the responses agree with these
types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

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
from trioserve.api.route_table import GENERATES, READS_BODY, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.api.streams.cursors import ResumeBody
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = ["OPERATIONS", "DeletedResponse", "InputTokens", "ResponseEvent", "ResponseItems", "ResponseObject"]


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all types: fields that are not described are forbidden."""


# --- items ---


class ResponseTopLogprob(Described):
    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(Described):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ResponseTopLogprob]


class OutputTextPart(Described, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ResponseLogprob] | UnsetType = UNSET


class InputTextPart(Described, tag_field="type", tag="input_text"):
    text: str


class InputImagePart(Described, tag_field="type", tag="input_image"):
    image_url: str


class ReasoningTextPart(Described, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(Described, tag_field="type", tag="summary_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Described, tag_field="type", tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[OutputTextPart | InputTextPart | InputImagePart]
    phase: Literal["commentary", "final_answer"] | UnsetType = UNSET


class ReasoningItem(Described, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryTextPart]
    content: list[ReasoningTextPart]


class FunctionCallItem(Described, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Described, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class LocalShellCallItem(Described, tag_field="type", tag="local_shell_call"):
    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus


class FunctionCallOutputItem(Described, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


class CustomToolCallOutputItem(Described, tag_field="type", tag="custom_tool_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


class LocalShellCallOutputItem(Described, tag_field="type", tag="local_shell_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | LocalShellCallItem
InputItem = OutputItem | FunctionCallOutputItem | CustomToolCallOutputItem | LocalShellCallOutputItem


class ResponseItems(Described):
    """One page of a list of items."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- the response ---


class ResponseInputDetails(Described):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(Described):
    reasoning_tokens: int


class ResponseUsage(Described):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseErrorDetail(Described):
    code: str
    message: str


class IncompleteDetails(Described):
    """Reason why a response is incomplete.

    Attributes:
        reason: The token limit, an abort or deadline, or new input of the user.
        stop_reason: For a partial result (`return_partial`): why the response was stopped. Null after an abort by id.
    """

    reason: Literal["max_output_tokens", "abort", "steered"]
    stop_reason: str | UnsetType | None = UNSET


class ResponseReasoning(Described):
    effort: str | None
    summary: str | None


class ResponseObject(Described):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseErrorDetail | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class DeletedResponse(Described):
    id: str
    object: Literal["response"]
    deleted: bool


class InputTokens(Described):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseEvent(msgspec.Struct):
    """Fields of events.

    `type` and `sequence_number` are always present. The others depend on the type, as in OpenAI's API.

    `response` is present in events about the whole response, and `item` in events that begin or end an item.
    """

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET


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
