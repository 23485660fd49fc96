"""Translates a body of the Messages API to a turn: messages, sampling, reasoning and tools. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.anthropic.bodies import (
    MESSAGES_RANGES,
    SAMPLING_FIELDS,
    Block,
    ContentSource,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    Message,
    MessagesBody,
    OutputFormat,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import check_cache_salt, deadlines_of
from trioserve.api.surface import THREAD_UNSUPPORTED
from trioserve.api.turn.chat_turn import Reasoning, TurnRequest
from trioserve.api.turn.messages import Piece, check_messages, image_part, joined_content, pieces_of
from trioserve.api.unread_fields import UNSET_VALUES
from trioserve.api.whole_response import ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape
from trioserve.text.response_parsers.offered_tools import ToolChoice, ToolMode, checked_tools

if TYPE_CHECKING:
    from trioserve.http.exchange import Headers

__all__ = ["chat_messages", "chat_tools", "counted_turn", "message_turn"]

MISPLACED_IMAGE = "is an image, but images are allowed in messages of the user only: move it there"
# Some agents put a line before their system prompt that changes with every request. The server drops this line, because
# otherwise no two prompts would share a prefix that the prefix cache could use.
BILLING_LINE = "x-anthropic-billing-header:"
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# This separator is inserted between blocks of one message, and between adjacent messages of one role.
BETWEEN = "\n"

ReadableBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


def chat_messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """Return the conversation as chat messages, beginning with the system prompt.

    Adjacent messages of one role are merged, because many templates refuse them. Each tool result becomes a message
    with the role "tool".

    Args:
        body: The request.

    Raises:
        InvalidRequest: A block cannot be rendered as text, or a tool result has no call. The error names the field.
    """
    if not body.messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    translated = _Translation()
    system = _system_text(body.system)
    if system:
        translated.add("system", system)
    for index, message in enumerate(body.messages):
        path = f"messages[{index}]"
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            translated.take_assistant(blocks, path)
        else:
            translated.take_user(message, blocks, path)
    last = body.messages[-1]
    if last.role == "assistant" and translated.messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "the last message is a tool call: send the tool_result in a message of the user after it",
            param=f"messages[{len(body.messages) - 1}]",
        )
    return translated.messages


class _Translation:
    """Collects the chat messages that the messages of a request are translated to.

    Attributes:
        messages: Chat messages so far.
        _names: Function names of the tool calls so far, by the id of the call.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, role: str, *pieces: Piece) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            pieces = (*pieces_of(self.messages[-1]["content"]), *pieces)
            self.messages[-1]["content"] = joined_content(pieces, BETWEEN)
        else:
            self.messages.append({"role": role, "content": joined_content(pieces, BETWEEN)})

    def take_user(self, message: Message, blocks: Iterable[Block], path: str) -> None:
        """Add a message of the user, or a system message in the middle of the conversation."""
        pieces: list[Piece] = []
        for index, block in enumerate(blocks):
            block_path = f"{path}.content[{index}]"
            if isinstance(block, ToolResultBlock):
                self._flush(message.role, pieces)
                self._add_result(block, block_path)
            elif isinstance(block, ImageBlock) and message.role == "user":
                pieces.append(_image(block, block_path))
            elif isinstance(block, ReadableBlock):
                pieces.append(_text(block, block_path))
            else:
                raise _misplaced(block, message.role, block_path)
        self._flush(message.role, pieces)

    def take_assistant(self, blocks: Iterable[Block], path: str) -> None:
        texts: list[str] = []
        reasonings: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            block_path = f"{path}.content[{index}]"
            if isinstance(block, ToolUseBlock):
                self._names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                reasonings.append(block.thinking)
            elif isinstance(block, ReadableBlock):
                texts.append(_text(block, block_path))
            elif not isinstance(block, RedactedThinkingBlock):
                raise _misplaced(block, "assistant", block_path)
        self.add("assistant", BETWEEN.join(texts))
        message = self.messages[-1]
        if calls:
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
        if reasonings:
            before = filter(None, [message.get("reasoning_content")])
            message["reasoning_content"] = BETWEEN.join([*before, *reasonings])

    def _flush(self, role: str, pieces: list[Piece]) -> None:
        if pieces:
            self.add(role, *pieces)
            pieces.clear()

    def _add_result(self, block: ToolResultBlock, block_path: str) -> None:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise InvalidRequest(
                f"tool_use_id is {block.tool_use_id[:100]!r}, but no earlier tool_use block has this id",
                param=f"{block_path}.tool_use_id",
            )
        content = block.content or ""
        if not isinstance(content, str):
            content = BETWEEN.join(_text(part, f"{block_path}.content[{index}]") for index, part in enumerate(content))
        if block.is_error:
            content = f"Error: {content}"  # Chat templates have no field for errors.
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content})


def chat_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as functions in the format of OpenAI's chat API.

    Args:
        tools: Field "tools".

    Raises:
        InvalidRequest: A tool would run at Anthropic, or is malformed.
    """
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)] if tools else None


def _function(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f'type is "{tool.type[:100]}", but only "custom" tools are supported, which the client runs itself',
            param=f"{path}.type",
        )
    if not TOOL_NAME.fullmatch(tool.name):
        raise InvalidRequest(
            f"name is {tool.name[:200]!r}, allowed are 1 to 128 letters, digits, _ and -", param=f"{path}.name"
        )
    if tool.input_schema is None:
        raise InvalidRequest(
            'input_schema is missing: send a JSON schema of type "object"', param=f"{path}.input_schema"
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _system_text(system: str | list[TextBlock] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return BETWEEN.join(block.text for block in system if not block.text.startswith(BILLING_LINE))


def _image(block: ImageBlock, block_path: str) -> dict[str, Any]:
    source = block.source or {}
    kind, data, url, media = (source.get(name) for name in ("type", "data", "url", "media_type"))
    if kind == "base64" and isinstance(data, str) and isinstance(media, str):
        return image_part(f"data:{media};base64,{data}")
    if kind == "url" and isinstance(url, str) and url:
        return image_part(url)
    raise InvalidRequest(
        'must have a source like {"type": "base64", "media_type": "image/png", "data": "..."}',
        param=f"{block_path}.source",
    )


def _text(block: ReadableBlock, block_path: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise InvalidRequest(MISPLACED_IMAGE, param=block_path)
    if isinstance(block, SearchResultBlock):
        return BETWEEN.join([block.title, block.source, *(part.text for part in block.content)])
    heads = [head for head in (block.title, block.context) if head]
    source = block.source
    if isinstance(source, TextSource):
        return BETWEEN.join([*heads, source.data])
    if isinstance(source, ContentSource):
        content = source.content
        texts = [content] if isinstance(content, str) else [_text(part, f"{block_path}.source") for part in content]
        return BETWEEN.join([*heads, *texts])
    raise InvalidRequest(
        'is not a text document: only a source of type "text" or "content" is supported',
        param=f"{block_path}.source",
    )


def _misplaced(block: Block, role: str, block_path: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"a block of type {kind} is not allowed in a message of the role {role}", param=block_path)


TOOL_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
UNSUPPORTED = {
    "container": "this server does not run programs",
    "mcp_servers": "this server does not call MCP servers: list the tools, and call them yourself",
}


def message_turn(body: MessagesBody, headers: Headers, defaults: SamplingParams) -> TurnRequest:
    """Translate the body of a message request.

    A max_tokens that does not fit into the context after the prompt is reduced. Clients of this API usually send the
    limit of the models for which they were written. A response that ends early reports that the context is full.

    Args:
        headers: Request headers.
        defaults: The server's default sampling options.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    for field, reason in UNSUPPORTED.items():
        if getattr(body, field) not in UNSET_VALUES:
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    if body.thread is not None:
        message = "thread is not supported: this server stores no conversations, send all messages"
        raise refusal(THREAD_UNSUPPORTED, message, param="thread")
    _check_range("max_tokens", body.max_tokens)
    if body.priority is not None and not PRIORITY_MIN <= body.priority <= PRIORITY_MAX:
        raise InvalidRequest(
            f"priority is {body.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
        )
    check_cache_salt(body.cache_salt)
    given: dict[str, object] = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    given |= {"n": 1, "logprobs": None, "prompt_logprobs": None, "clamp_max_tokens": True}
    if body.stop_sequences is not None:
        given["stop"] = tuple(body.stop_sequences)
    try:
        sampling = msgspec.structs.replace(defaults, **given)
    except InvalidRequest as error:
        if error.param != "stop":
            raise
        raise InvalidRequest(str(error), param="stop_sequences") from None
    return msgspec.structs.replace(
        _turn(body, sampling, tokens_max=body.max_tokens),
        priority=body.priority,
        cache_salt=body.cache_salt,
        retention_seconds=body.retention_seconds,
        deadlines=deadlines_of(body, headers),
        shape=ResponseShape(is_streamed=bool(body.stream)),
    )


def counted_turn(body: CountTokensBody, defaults: SamplingParams) -> TurnRequest:
    """Return the turn for a request that only counts prompt tokens.

    Args:
        body: fields of the request, which has no limit of output tokens.
        defaults: The server's default sampling options.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    return _turn(body, defaults, tokens_max=None)


def _turn(body: CountTokensBody, sampling: SamplingParams, *, tokens_max: int | None) -> TurnRequest:
    for index, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        if str(edit.get("type")).startswith("compact"):
            param = f"context_management.edits[{index}]"
            raise InvalidRequest(f"{param} is not supported: this server does not summarise a context", param=param)
    messages = check_messages(chat_messages(body))
    tools = _tools(body)
    continues = body.messages[-1].role == "assistant"
    return TurnRequest(
        messages=messages,
        sampling=sampling,
        tools=tools,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        structured=_structured(body),
        reasoning=_reasoning(body, tokens_max),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _tools(body: CountTokensBody) -> list[dict[str, Any]] | None:
    try:
        return checked_tools(chat_tools(body.tools))
    except InvalidRequest as error:
        # The error names fields of OpenAI's API, which are replaced by the field names of Anthropic's API.
        message, param = (
            text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
            for text in (str(error), error.param or "tools")
        )
        raise InvalidRequest(message, param=param) from None


def _tool_choice(body: CountTokensBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    names = [tool.name for tool in body.tools or ()]
    if choice.type in ("any", "tool") and not names:
        raise InvalidRequest(f'tool_choice is "{choice.type}", but there are no tools: send tools', param="tool_choice")
    if choice.type == "tool":
        if choice.name not in names:
            raise InvalidRequest(
                f"tool_choice names {choice.name if choice.name is None else choice.name[:200]!r}, but the tools are: "
                + ", ".join(names),
                param="tool_choice.name",
            )
        return ToolChoice(mode=ToolMode.NAMED, name=choice.name)
    return ToolChoice(mode=TOOL_MODES[choice.type])


def _structured(body: CountTokensBody) -> StructuredOutput | None:
    wanted: OutputFormat | None = body.output_format
    field = "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        wanted, field = body.output_config.format, "output_config.format"
    if wanted is None:
        return None
    check_shape(wanted.schema, f"{field}.schema")
    return StructuredOutput.json(wanted.schema, param=f"{field}.schema", strict=False)


def _reasoning(body: CountTokensBody, tokens_max: int | None) -> Reasoning:
    effort = None if body.output_config is None else body.output_config.effort
    thinking = body.thinking
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return Reasoning(effort=effort)
    if thinking.type == "disabled":
        return Reasoning(is_on=False)
    budget = thinking.budget_tokens
    if budget is None:
        raise InvalidRequest(
            'budget_tokens is missing: thinking of type "enabled" needs it',
            param="thinking.budget_tokens",
        )
    _check_range("Thinking.budget_tokens", budget, param="thinking.budget_tokens")
    if tokens_max is not None and budget >= tokens_max:
        raise InvalidRequest(
            f"budget_tokens is {budget}, but must be less than max_tokens, which is {tokens_max}",
            param="thinking.budget_tokens",
        )
    return Reasoning(is_on=True, effort=effort, budget_tokens=budget)


def _check_range(field: str, value: int, *, param: str | None = None) -> None:
    allowed = MESSAGES_RANGES[field]
    if not allowed.holds(value):
        raise InvalidRequest(f"{field.rpartition('.')[2]} is {value}, allowed is {allowed}", param=param or field)
