"""Translates Anthropic's messages and tools to OpenAI's chat shape, which chat templates expect. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trioserve.api.anthropic.request_types import (
    Block,
    ContentSource,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    Message,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from trioserve.api.turn.image_parts import Piece, image_part, joined_content, pieces_of
from trioserve.contracts.errors import InvalidRequest

__all__ = ["chat_messages", "chat_tools"]

MISPLACED_IMAGE = "is an image, but images are allowed in messages of the user only: move it there"
# Some agents put a line before their system prompt that changes with every request. The line is dropped: otherwise each
# prompt would differ from its first block on, and the prefix cache could not be used.
BILLING_LINE = "x-anthropic-billing-header:"
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# Separator between blocks of one message, and between adjacent messages of one role.
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
    """Collects the chat messages.

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
            content = f"Error: {content}"  # templates have no field for errors
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content})


def chat_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as functions of OpenAI's shape.

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
