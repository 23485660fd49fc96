"""The bodies of Anthropic's Messages API: which fields there are and of which type.

What happens to fields that are not named here is decided in api/unread_fields.py. `cache_control` is harmless: prefixes
are cached without being asked. `None` means "not given" but for what has to be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.api.resume_body import ResumeBody
from trioserve.api.unread_fields import RefusedField, generation_fields
from trioserve.contracts.sampling import SAMPLING_RANGES, Range

__all__ = [
    "MESSAGES_RANGES",
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

MESSAGES_RANGES = {
    "max_tokens": Range(1, None),
    "temperature": SAMPLING_RANGES["temperature"],
    "top_p": SAMPLING_RANGES["top_p"],
    "top_k": SAMPLING_RANGES["top_k"],
    "Thinking.budget_tokens": Range(1, None),
}
"""Of the numbers in a body, by field, or by type and field. Anthropic's own models want a budget of 1024 or
more; others may think less."""


OTHER_FIELDS = {
    "reasoning_effort": "send output_config.effort",
    "enable_thinking": "send thinking",
    "thinking_token_budget": "send thinking.budget_tokens",
    "compaction": "a context is not summarised here, shorten the messages",
    "mcp_servers": "no servers are asked for tools here, list the tools and call them yourself",
    "fallbacks": "a request has one model here, send model",
    "best_of": "a message has one choice",
}
"""Fields that are refused because they would change the prompt or the response, and what to do instead."""


class _Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    text: str


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    """signature: as it was given out; it is not looked at."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """A thought that only its maker can read: the model does not see it."""

    data: str | None = None


class ImageBlock(_Block, frozen=True, kw_only=True, tag="image"):
    """source: {"type": "base64", "media_type": "image/png", "data": "..."}, or {"type": "url", "url": "..."}. Read in
    messages of the user."""

    source: dict[str, Any] | None = None


class TextSource(_Block, frozen=True, kw_only=True, tag="text"):
    data: str


class ContentSource(_Block, frozen=True, kw_only=True, tag="content"):
    content: str | list[TextBlock | ImageBlock]


class Base64Source(_Block, frozen=True, kw_only=True, tag="base64"):
    """Refused: only text is read."""


class UrlSource(_Block, frozen=True, kw_only=True, tag="url"):
    """Refused: nothing is fetched."""


class FileSource(_Block, frozen=True, kw_only=True, tag="file"):
    """Refused: files are for batches."""


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
    """type: absent, or "custom"; others run at Anthropic's and are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """display: what of a thought is shown: all of it, or, with "omitted", only that there was one."""

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
    """Edits that leave old tool results or reasoning out are not done: the whole context is read. An edit that writes a
    summary is refused."""

    edits: list[dict[str, Any]] | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """model: the first that is served, if it is not given. output_format: the older name of output_config.format."""

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


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """priority and all behind it are this server's own fields, the same as in chat completions."""

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
