"""Checks of chat messages in OpenAI's shape: roles, contents, tool calls and tool results."""

from __future__ import annotations

from typing import Any

from trioserve.api.turn.image_parts import check_image_part
from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = ["check_messages"]


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the messages unchanged if a chat template can render them.

    Args:
        messages: Value of the field "messages".

    Raises:
        InvalidRequest: A message is malformed. The error names the field by its path.
    """
    if not messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    # This check must be first: it limits the nesting depth. The other checks print values, and printing is recursive.
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
    if part.get("type") != "text":
        raise InvalidRequest(
            f'{path} is of type {part.get("type")!r}, but only "text" and "image_url" are supported',
            param=f"{path}.type",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
