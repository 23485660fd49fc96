"""Types of everything that the Responses API sends.

The server encodes, stores and describes responses, their items and their events with these types. The store has objects
of earlier versions, so a new field of a response or an item needs a default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import ChatToken
from trioserve.api.response import Response
from trioserve.api.streams.cursors import ResumeBody

# --- items ---


class OutputTextPart(Response, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChatToken] | UnsetType = UNSET


class InputTextPart(Response, tag_field="type", tag="input_text"):
    text: str


class InputImagePart(Response, tag_field="type", tag="input_image"):
    image_url: str


class ReasoningTextPart(Response, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(Response, tag_field="type", tag="summary_text"):
    text: str


ContentPart = OutputTextPart | InputTextPart | InputImagePart
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Item(Response, tag_field="type"):
    id: str
    status: ItemStatus

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


class MessageItem(Item, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: list[ContentPart]
    phase: Literal["commentary", "final_answer"] | UnsetType = UNSET


class ReasoningItem(Item, tag="reasoning"):
    summary: list[SummaryTextPart]
    content: list[ReasoningTextPart]


class CallItem(Item):
    call_id: str


class FunctionCallItem(CallItem, tag="function_call"):
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(CallItem, tag="custom_tool_call"):
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class LocalShellCallItem(CallItem, tag="local_shell_call"):
    action: dict[str, Any]


class CallOutputItem(Item):
    call_id: str
    output: str | list[InputTextPart]


class FunctionCallOutputItem(CallOutputItem, tag="function_call_output"):
    pass


class CustomToolCallOutputItem(CallOutputItem, tag="custom_tool_call_output"):
    pass


class LocalShellCallOutputItem(CallOutputItem, tag="local_shell_call_output"):
    pass


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | LocalShellCallItem
InputItem = OutputItem | FunctionCallOutputItem | CustomToolCallOutputItem | LocalShellCallOutputItem


class ResponseItems(Response, tag_field="object", tag="list"):
    """One page of a list of items."""

    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


# --- the response ---


class ResponseInputDetails(Response):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(Response):
    reasoning_tokens: int


class ResponseUsage(Response):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseErrorDetail(Response):
    code: str
    message: str


class IncompleteDetails(Response):
    """Reason why a response is incomplete.

    Attributes:
        reason: The token limit, an abort or deadline, or new input of the user.
        stop_reason: For a partial result (`return_partial`): why the response was stopped. Null after an abort by id.
    """

    reason: Literal["max_output_tokens", "abort", "steered"]
    stop_reason: str | UnsetType | None = UNSET


class ResponseReasoning(Response):
    effort: str | None
    summary: str | None


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(Response, tag_field="object", tag="response"):
    id: str
    created_at: int
    completed_at: int | None
    status: ResponseStatus
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


class DeletedResponse(Response, tag_field="object", tag="response"):
    id: str
    deleted: bool


class InputTokens(Response, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class ResponseEvent(Response):
    """An event of a response.

    `type` and `sequence_number` are always present. The others depend on the type, as in OpenAI's API.

    `response` is present in events about the whole response, and `item` in events that begin or end an item.
    `stream_id` names the lane on a websocket.
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
    part: ContentPart | ReasoningTextPart | SummaryTextPart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatToken] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


# --- further events of websockets ---


class ErrorEvent(Response, tag_field="type", tag="error"):
    """An error on a websocket.

    Attributes:
        error: The error as in HTTP. It repeats `headers`, because some clients read them there.
        sequence_number: Always 0, because the event belongs to no response. Some clients need it.
        headers: Header fields that the error has in HTTP.
        stream_id: Lane of the message that failed.
    """

    status: int
    error: dict[str, Any]
    sequence_number: int = 0
    headers: dict[str, str] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET


class SteeredInput(Response):
    """Input for the successor of a response.

    Attributes:
        previous_response_id: The response.
        id: Id of the input, if it was accepted.
        input: The input, if the client gets it back.
    """

    previous_response_id: str
    id: str | UnsetType = UNSET
    input: str | list[dict[str, Any]] | UnsetType = UNSET


class SteerError(Response, tag_field="type", tag="invalid_request_error"):
    code: str
    message: str


class RequiredInput(Response):
    """An input item that a client must send before its steered input has an effect.

    Attributes:
        type: Type of the item.
        call_id: The tool call whose output is missing.
        name: Name of the function. Only of functions.
    """

    type: str
    call_id: str
    name: str | UnsetType = UNSET


class SteeringEvent(Response):
    """An event about input that steers a response.

    Attributes:
        error: Reason of a failure.
        reason: Reason why the input has no effect yet.
    """

    type: Literal["response.steer.accepted", "response.steer.pending", "response.steer.failed"]
    steer: SteeredInput
    sequence_number: int = 0
    error: SteerError | UnsetType = UNSET
    reason: Literal["waiting_for_required_input"] | UnsetType = UNSET
    required_input: list[RequiredInput] | UnsetType = UNSET
    stream_id: str | UnsetType = UNSET
