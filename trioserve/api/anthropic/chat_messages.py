"""Messages of Anthropic's shape as messages of OpenAI's chat shape, for which chat templates are written. Pure."""

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

MISPLACED_IMAGE = "is an image, and images are read in messages of the user alone: put it there"
# Some agents put a line that changes with every request before their system prompt; kept, it would make each prompt
# new from its first block on, and nothing of it could be found in the prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# A paragraph's space, as between blocks of one message and between messages of one role that follow each other.
BETWEEN = "\n"

ReadableBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


def chat_messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """The conversation, the system prompt first. Messages of one role that follow each other are one: they are in this
    API, and many templates take no others. A result of a tool is a message of its own, with the role "tool".

    Raises InvalidRequest, naming the place, for what cannot be said as text, and for results without their calls.
    """
    if not body.messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    translated = _Translation()
    system = _system_text(body.system)
    if system:
        translated.add("system", system)
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            translated.take_assistant(blocks, place)
        else:
            translated.take_others(message, blocks, place)
    last = body.messages[-1]
    if last.role == "assistant" and translated.messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "the last message is a call of a tool: send the tool_result in a message of the user behind it",
            param=f"messages[{len(body.messages) - 1}]",
        )
    return translated.messages


class _Translation:
    """messages: so far. names: of the functions that were called, by the id of the call."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, role: str, *pieces: Piece) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            pieces = (*pieces_of(self.messages[-1]["content"]), *pieces)
            self.messages[-1]["content"] = joined_content(pieces, BETWEEN)
        else:
            self.messages.append({"role": role, "content": joined_content(pieces, BETWEEN)})

    def take_others(self, message: Message, blocks: Iterable[Block], place: str) -> None:
        """Of the user, or of the system in the middle of the conversation."""
        pieces: list[Piece] = []
        for index, block in enumerate(blocks):
            at = f"{place}.content[{index}]"
            if isinstance(block, ToolResultBlock):
                self._flush(message.role, pieces)
                self._add_result(block, at)
            elif isinstance(block, ImageBlock) and message.role == "user":
                pieces.append(_image(block, at))
            elif isinstance(block, ReadableBlock):
                pieces.append(_text(block, at))
            else:
                raise _misplaced(block, message.role, at)
        self._flush(message.role, pieces)

    def take_assistant(self, blocks: Iterable[Block], place: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            at = f"{place}.content[{index}]"
            if isinstance(block, ToolUseBlock):
                self._names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ReadableBlock):
                texts.append(_text(block, at))
            elif not isinstance(block, RedactedThinkingBlock):
                raise _misplaced(block, "assistant", at)
        self.add("assistant", BETWEEN.join(texts))
        message = self.messages[-1]
        if calls:
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
        if thoughts:
            message["reasoning_content"] = BETWEEN.join([*filter(None, [message.get("reasoning_content")]), *thoughts])

    def _flush(self, role: str, pieces: list[Piece]) -> None:
        if pieces:
            self.add(role, *pieces)
            pieces.clear()

    def _add_result(self, block: ToolResultBlock, at: str) -> None:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise InvalidRequest(
                f"tool_use_id is {block.tool_use_id[:100]!r}, and no tool_use block before it has that id",
                param=f"{at}.tool_use_id",
            )
        content = block.content or ""
        if not isinstance(content, str):
            content = BETWEEN.join(_text(part, f"{at}.content[{index}]") for index, part in enumerate(content))
        if block.is_error:
            content = f"Error: {content}"  # templates have no other place for it
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content})


def chat_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """As functions of OpenAI's shape. Raises InvalidRequest for those that only Anthropic can run."""
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)] if tools else None


def _function(tool: Tool, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f'type is "{tool.type[:100]}", and only "custom" tools are served here, those that the client runs itself',
            param=f"{place}.type",
        )
    if not TOOL_NAME.fullmatch(tool.name):
        raise InvalidRequest(
            f"name is {tool.name[:200]!r}, allowed are 1 to 128 letters, digits, _ and -", param=f"{place}.name"
        )
    if tool.input_schema is None:
        raise InvalidRequest(
            'input_schema is missing: send a JSON schema of type "object"', param=f"{place}.input_schema"
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


def _image(block: ImageBlock, at: str) -> dict[str, Any]:
    source = block.source or {}
    kind, data, url, media = (source.get(name) for name in ("type", "data", "url", "media_type"))
    if kind == "base64" and isinstance(data, str) and isinstance(media, str):
        return image_part(f"data:{media};base64,{data}")
    if kind == "url" and isinstance(url, str) and url:
        return image_part(url)
    raise InvalidRequest(
        'must have a source like {"type": "base64", "media_type": "image/png", "data": "..."}', param=f"{at}.source"
    )


def _text(block: ReadableBlock, at: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise InvalidRequest(MISPLACED_IMAGE, param=at)
    if isinstance(block, SearchResultBlock):
        return BETWEEN.join([block.title, block.source, *(part.text for part in block.content)])
    heads = [head for head in (block.title, block.context) if head]
    source = block.source
    if isinstance(source, TextSource):
        return BETWEEN.join([*heads, source.data])
    if isinstance(source, ContentSource):
        content = source.content
        texts = [content] if isinstance(content, str) else [_text(part, f"{at}.source") for part in content]
        return BETWEEN.join([*heads, *texts])
    raise InvalidRequest(
        'is no text: of documents only those with a source of type "text" or "content" are read here',
        param=f"{at}.source",
    )


def _misplaced(block: Block, role: str, at: str) -> InvalidRequest:
    kind = type(block).__struct_config__.tag
    return InvalidRequest(f"a block of type {kind} cannot stand in a message of the role {role}", param=at)
