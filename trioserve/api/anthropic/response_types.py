"""Types of messages in the format of Anthropic's Messages API, and of the events of streamed messages."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from trioserve.api.response import Response
from trioserve.api.streams.cursors import ResumeBody
from trioserve.contracts.weights import WeightVersions


class Tagged(Response, tag_field="type"):
    """Base of types that have a field "type"."""


class Caller(Tagged, tag="direct"):
    """The model itself made the call. The call does not come from a program that the model wrote."""


class TextContent(Tagged, tag="text"):
    text: str
    citations: None


class ThinkingContent(Tagged, tag="thinking"):
    """Reasoning.

    Attributes:
        thinking: The reasoning.
        signature: Clients send it back with the reasoning. It is not checked.
    """

    thinking: str
    signature: str


class ToolUseContent(Tagged, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller


Content = TextContent | ThinkingContent | ToolUseContent


class OutputTokensDetails(Response):
    thinking_tokens: int


class MessageUsage(Response):
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


class AbortDetails(Tagged, tag="abort"):
    """Reason why a response was stopped. `reason` is null after an abort by id."""

    reason: str | None


class MessageResponse(Tagged, tag="message"):
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
    weight_versions: WeightVersions | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class MessageTokens(Response):
    input_tokens: int


# --- events ---


class MessageStart(Tagged, tag="message_start"):
    message: MessageResponse


class ContentBlockStart(Tagged, tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(Tagged, tag="text_delta"):
    text: str


class ThinkingDelta(Tagged, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Tagged, tag="signature_delta"):
    signature: str


class InputJsonDelta(Tagged, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(Tagged, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Tagged, tag="content_block_stop"):
    index: int


class StopDelta(Response):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: AbortDetails | None
    container: None


class MessageDelta(Tagged, tag="message_delta"):
    """Event with the end of a message. `usage` counts the whole message."""

    delta: StopDelta
    usage: MessageUsage
    weight_versions: WeightVersions | UnsetType = UNSET
    resume: ResumeBody | UnsetType = UNSET


class MessageStop(Tagged, tag="message_stop"):
    """Last event of a stream."""


class Ping(Tagged, tag="ping"):
    """Keep-alive event of a running response."""
