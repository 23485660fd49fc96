"""Bodies of requests of Anthropic's Messages API, messages in its format, and the events of streamed messages.

`None` means "not given". api/unread_fields.py decides what happens to fields that are not listed here. All prefixes are
cached anyway. `cache_control` says for how long the cache should prefer to keep the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.request_types import Int32
from trioserve.api.response import Response
from trioserve.api.session_fields import CacheControl
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.unread_fields import RefusedField, generation_fields
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range
from trioserve.contracts.weights import WeightVersions

__all__ = [
    "MESSAGES_RANGES",
    "SAMPLING_FIELDS",
    "Block",
    "CountTokensBody",
    "DocumentBlock",
    "ImageBlock",
    "Message",
    "MessagesBody",
    "OutputConfig",
    "RedactedThinkingBlock",
    "SearchResultBlock",
    "TextBlock",
    "Thinking",
    "ThinkingBlock",
    "Tool",
    "ToolChoice",
    "ToolResultBlock",
    "ToolUseBlock",
]


OTHER_FIELDS = {
    "reasoning_effort": "send output_config.effort",
    "enable_thinking": "send thinking",
    "thinking_token_budget": "send thinking.budget_tokens",
    "compaction": "this server does not summarise a context, shorten the messages",
    "mcp_servers": "this server does not call MCP servers, list the tools and call them yourself",
    "fallbacks": "a request has one model, send model",
    "best_of": "a message has one choice",
}
"""Fields that are refused because they would change the prompt or the response, and what to do instead."""


class _Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    text: str


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """Reasoning of an earlier response.

    Attributes:
        thinking: The reasoning.
        signature: Signature that the response had. It is ignored.
    """

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Encrypted reasoning of another provider. The model does not see it."""

    data: str | None = None


class ImageBlock(_Block, frozen=True, kw_only=True, tag="image"):
    """An image. Allowed in messages of the user only.

    Attributes:
        source: {"type": "base64", "media_type": "image/png", "data": "..."}, or {"type": "url", "url": "..."}.
    """

    source: dict[str, Any] | None = None


class TextSource(_Block, frozen=True, kw_only=True, tag="text"):
    data: str


class ContentSource(_Block, frozen=True, kw_only=True, tag="content"):
    content: str | list[TextBlock | ImageBlock]


class Base64Source(_Block, frozen=True, kw_only=True, tag="base64"):
    """Refused: only text documents are supported."""


class UrlSource(_Block, frozen=True, kw_only=True, tag="url"):
    """Refused: the server does not fetch documents."""


class FileSource(_Block, frozen=True, kw_only=True, tag="file"):
    """Refused: uploaded files are for batches only."""


class DocumentBlock(_Block, frozen=True, kw_only=True, tag="document"):
    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(_Block, frozen=True, kw_only=True, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs.

    Attributes:
        name: Name of the tool.
        type: Absent or "custom". Tools that run at Anthropic are refused.
        description: Description for the model.
        input_schema: JSON schema of the arguments.
        strict: True if the arguments must follow the schema.
        cache_control: Mark that the tools up to this one are used again.
    """

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Options for reasoning.

    Attributes:
        type: "enabled", "disabled", or left to the model.
        budget_tokens: Limit for reasoning tokens.
        display: "omitted" sends reasoning blocks without text. Otherwise the whole reasoning is sent.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int32 | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    user_id: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """Edits of the context.

    Edits that remove old tool results or reasoning are ignored: the model reads the whole context. An edit that writes
    a summary is refused.
    """

    edits: list[dict[str, Any]] | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a request that counts prompt tokens.

    Attributes:
        model: Name of the model. Default: the first model that is served.
        output_format: Older name of output_config.format.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send output_config.format", **OTHER_FIELDS
    )

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    @property
    def retention_seconds(self) -> float | None:
        """The longest time of all cache_control marks. None: there is no mark."""
        system = self.system if isinstance(self.system, list) else ()
        contents = (message.content for message in self.messages if isinstance(message.content, list))
        marked = itertools.chain((self,), system, self.tools or (), *contents)
        return max((each.cache_control.seconds for each in marked if each.cache_control is not None), default=None)


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """Body of a request for a message.

    `priority` and the fields after it are this server's own, with the same meaning as in chat completions.
    """

    REFUSED_FIELDS: ClassVar[Mapping[str, RefusedField]] = generation_fields(
        structured="send output_config.format",
        sampling="the Messages API does not have it, see /v1/chat/completions",
        stop="send stop_sequences",
        max_completion_tokens="send max_tokens",
        **OTHER_FIELDS,
    )

    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    priority: Int32 | None = None
    seed: int | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    resume: ResumeBody | None = None
    return_partial: bool | None = None


SAMPLING_FIELDS = tuple(name for name in MessagesBody.__struct_fields__ if name in SAMPLING_RANGES)
"""Numbers that have the same name in SamplingParams."""

MESSAGES_RANGES = {
    **{name: SAMPLING_RANGES[name] for name in SAMPLING_FIELDS},
    "max_tokens": Range(1, None),
    "Thinking.budget_tokens": Range(1, None),
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}
"""Allowed ranges of numbers, by field, or by type and field.

Anthropic's own models require a budget of at least 1024 reasoning tokens. Other models may have less.
"""


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
