"""Checks of chat messages in OpenAI's format: roles, contents, images, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = ["Piece", "check_messages", "image_part", "joined_content", "pieces_of"]

Piece = str | dict[str, Any]
"""A text, or an image part."""


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def check_image_part(part: dict[str, Any], path: str) -> None:
    """Check that an image part has a URL.

    Args:
        part: Content part of the type "image_url".
        path: Field name of the part, for the error.

    Raises:
        InvalidRequest: The URL is missing, empty or not a string. The error names the field.
    """
    url = part.get("image_url")
    if isinstance(url, dict):
        path, url = f"{path}.image_url.url", url.get("url")
    else:
        path = f"{path}.image_url"
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f'{path} must be a string: "data:image/png;base64,..."', param=path)


def joined_content(pieces: Iterable[Piece], between: str) -> str | list[dict[str, Any]]:
    """Return a message content made of these pieces.

    Args:
        pieces: Texts and image parts. Empty texts are left out.
        between: Separator between adjacent texts, which become one text part.

    Returns:
        A string if there are no images, otherwise a list of content parts.
    """
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, dict):
            parts.append(piece)
        elif not piece:
            continue
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + piece
        else:
            parts.append({"type": "text", "text": piece})
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def pieces_of(content: str | list[dict[str, Any]]) -> list[Piece]:
    """Return the pieces of a content that joined_content made.

    Args:
        content: A string or a list of text and image parts.
    """
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part for part in content]


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the messages unchanged if a chat template can render them.

    Args:
        messages: Value of the field "messages".

    Raises:
        InvalidRequest: A message is malformed. The error names the field by its path.
    """
    if not messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    # This check must be first, because it limits the nesting depth. The other checks print values, and printing is
    # recursive.
    check_shape(messages, "messages")
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        _check_message(message, path)
        if message["role"] == "assistant":
            call_ids |= _call_ids(message, path)
        elif message["role"] == "tool":
            _check_result(message, path, call_ids)
    return messages


def _check_message(message: dict[str, Any], path: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{path} has no role: a non-empty string is needed", param=f"{path}.role")
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if role != "assistant":
            raise InvalidRequest(
                f"{path} has no content: a string or a list of text parts is needed", param=f"{path}.content"
            )
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}.content is neither a string nor a list of text parts", param=f"{path}.content")
    for index, part in enumerate(content):
        _check_part(part, f"{path}.content[{index}]")


def _call_ids(message: dict[str, Any], path: str) -> set[str]:
    calls = message.get("tool_calls")
    if calls is None:
        return set()
    if not isinstance(calls, list):
        raise InvalidRequest(f"{path}.tool_calls must be a list", param=f"{path}.tool_calls")
    return {_call_id(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)}


def _call_id(call: object, path: str) -> str:
    """Return the id of a tool call. Later code checks that the arguments are JSON."""
    if not isinstance(call, dict):
        raise InvalidRequest(
            f'{path} must be an object: {{"id": "...", "type": "function", "function": {{"name": "...", '
            '"arguments": "..."}}',
            param=path,
        )
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{path} has no id: a non-empty string is needed", param=f"{path}.id")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f'{path}.type is {shown(call["type"])}, allowed is "function"', param=f"{path}.type")
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.function has no name: a non-empty string is needed", param=f"{path}.function")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise InvalidRequest(
            f"{path}.function.arguments must be a JSON object in a string", param=f"{path}.function.arguments"
        )
    return call_id


def _check_result(message: dict[str, Any], path: str, call_ids: set[str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(
            f"{path} is of the role tool and has no tool_call_id: send the id of the call that it answers",
            param=f"{path}.tool_call_id",
        )
    if call_id not in call_ids:
        raise InvalidRequest(
            f"{path}.tool_call_id is {shown(call_id)}, but no assistant message before it has a call with this id",
            param=f"{path}.tool_call_id",
        )


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise InvalidRequest(f'{path} is not a content part: send {{"type": "text", "text": "..."}}', param=path)
    if part.get("type") == "image_url":
        check_image_part(part, path)
        return
    if part.get("type") == "input_audio":
        return  # split_media checks it.
    if part.get("type") != "text":
        raise InvalidRequest(
            f'{path} is of type {part.get("type")!r}, but only "text", "image_url" and "input_audio" are supported',
            param=f"{path}.type",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
