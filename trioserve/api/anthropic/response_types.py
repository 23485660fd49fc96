"""What responses of the Messages API look like, as types: for the API's description and whoever checks responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.resume_body import ResumeBody

__all__ = [
    "ContentBlockDelta",
    "ContentBlockStart",
    "ContentBlockStop",
    "MessageDelta",
    "MessageResponse",
    "MessageStart",
    "MessageStop",
    "MessageTokens",
    "MessagesError",
    "Ping",
]


class Response(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all have in common: no field that is not described."""


class Tagged(Response, tag_field="type", kw_only=True):
    """With a type that tells what it is."""


# --- errors ---


class MessagesErrorDetail(Response, kw_only=True):
    """type: for programs; message: for people."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "conflict_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class MessagesError(Tagged, tag="error", kw_only=True):
    """Also an event: the last one of a response that could not be completed."""

    error: MessagesErrorDetail
    request_id: str


# --- a message ---


class Caller(Response, kw_only=True):
    type: Literal["direct"]


class TextContent(Tagged, tag="text", kw_only=True):
    text: str
    citations: None


class ThinkingContent(Tagged, tag="thinking", kw_only=True):
    """signature: to be sent back with the thought. It proves nothing."""

    thinking: str
    signature: str


class ToolUseContent(Tagged, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


Content = TextContent | ThinkingContent | ToolUseContent


class OutputTokensDetails(Response, kw_only=True):
    thinking_tokens: int


class MessageUsage(Response, kw_only=True):
    """The prompt's tokens are input_tokens and, of those that were found in the cache, cache_read_input_tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


# "abort" is told to those alone who sent return_partial.
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "abort"]


class AbortDetails(Tagged, tag="abort", kw_only=True):
    """reason: why it was cut off; null after an abort by id."""

    reason: str | None


class MessageResponse(Tagged, tag="message", kw_only=True):
    """stop_reason: null only in the first event of a stream."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: AbortDetails | None
    container: None
    usage: MessageUsage
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class MessageTokens(Response, kw_only=True):
    input_tokens: int


# --- events ---


class MessageStart(Tagged, tag="message_start", kw_only=True):
    message: MessageResponse


class ContentBlockStart(Tagged, tag="content_block_start", kw_only=True):
    index: int
    content_block: Content


class TextDelta(Tagged, tag="text_delta", kw_only=True):
    text: str


class ThinkingDelta(Tagged, tag="thinking_delta", kw_only=True):
    thinking: str


class SignatureDelta(Tagged, tag="signature_delta", kw_only=True):
    signature: str


class InputJsonDelta(Tagged, tag="input_json_delta", kw_only=True):
    partial_json: str


class ContentBlockDelta(Tagged, tag="content_block_delta", kw_only=True):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Tagged, tag="content_block_stop", kw_only=True):
    index: int


class StopDelta(Response, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: AbortDetails | None
    container: None


class MessageDelta(Tagged, tag="message_delta", kw_only=True):
    """usage: of the whole message."""

    delta: StopDelta
    usage: MessageUsage
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class MessageStop(Tagged, tag="message_stop", kw_only=True):
    pass


class Ping(Tagged, tag="ping", kw_only=True):
    """Says that the response goes on."""
