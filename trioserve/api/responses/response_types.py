"""Types of everything that the Responses API sends.

The handlers of small responses encode these types. Response objects, their items and events are dicts, because they are
also read from the store (see events.py). Tests check that the dicts agree with these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import ChatToken
from trioserve.api.response import Response
from trioserve.api.streams.cursors import ResumeBody

__all__ = ["DeletedResponse", "InputTokens", "ResponseEvent", "ResponseItems", "ResponseObject"]

# --- items ---


class OutputTextPart(Response, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[ChatToken] | UnsetType = UNSET


class InputTextPart(Response, tag_field="type", tag="input_text"):
    text: str


class InputImagePart(Response, tag_field="type", tag="input_image"):
    image_url: str


class ReasoningTextPart(Response, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryTextPart(Response, tag_field="type", tag="summary_text"):
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Response, tag_field="type", tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[OutputTextPart | InputTextPart | InputImagePart]
    phase: Literal["commentary", "final_answer"] | UnsetType = UNSET


class ReasoningItem(Response, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryTextPart]
    content: list[ReasoningTextPart]


class FunctionCallItem(Response, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Response, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class LocalShellCallItem(Response, tag_field="type", tag="local_shell_call"):
    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus


class FunctionCallOutputItem(Response, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


class CustomToolCallOutputItem(Response, tag_field="type", tag="custom_tool_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


class LocalShellCallOutputItem(Response, tag_field="type", tag="local_shell_call_output"):
    id: str
    call_id: str
    output: str | list[InputTextPart]
    status: ItemStatus


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


class ResponseObject(Response):
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


class DeletedResponse(Response, tag_field="object", tag="response"):
    id: str
    deleted: bool


class InputTokens(Response, tag_field="object", tag="response.input_tokens"):
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
