"""Types of everything that the Messages API sends, for the OpenAPI document and for tests that check responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.streams.cursors import ResumeBody

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
    """Base of all types: fields that are not described are forbidden."""


class Tagged(Response, tag_field="type", kw_only=True):
    """Base of types that have a field "type"."""


# --- errors ---


class MessagesErrorDetail(Response, kw_only=True):
    """An error: `type` is for programs, `message` for people."""

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
    """An error response. Also the last event of a stream that failed."""

    error: MessagesErrorDetail
    request_id: str


# --- a message ---


class Caller(Response, kw_only=True):
    type: Literal["direct"]


class TextContent(Tagged, tag="text", kw_only=True):
    text: str
    citations: None


class ThinkingContent(Tagged, tag="thinking", kw_only=True):
    """Reasoning.

    Attributes:
        thinking: The reasoning.
        signature: Clients send it back with the reasoning. It is not checked.
    """

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
    """Token counts. The prompt has `input_tokens` + `cache_read_input_tokens` tokens.

    `cache_read_input_tokens` counts the prompt tokens that were found in the prefix cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None
    server_tool_use: None
    service_tier: Literal["standard"]
    inference_geo: None


# Only clients that sent return_partial get "abort".
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "abort"]


class AbortDetails(Tagged, tag="abort", kw_only=True):
    """Reason why a response was stopped. `reason` is null after an abort by id."""

    reason: str | None


class MessageResponse(Tagged, tag="message", kw_only=True):
    """A message. `stop_reason` is null only in the first event of a stream."""

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
    """Event with the end of a message. `usage` counts the whole message."""

    delta: StopDelta
    usage: MessageUsage
    weight_versions: list[tuple[str, int]] | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class MessageStop(Tagged, tag="message_stop", kw_only=True):
    pass


class Ping(Tagged, tag="ping", kw_only=True):
    """Keep-alive event of a running response."""
