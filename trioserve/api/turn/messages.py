"""Which messages are taken: roles, contents, tool calls and their results, in OpenAI's chat shape."""

from __future__ import annotations

from typing import Any

from trioserve.api.turn.image_parts import check_image_part
from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = ["check_messages"]


def check_messages(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The messages themselves. Raises InvalidRequest, naming the field by its path, for what a template could not make
    text of."""
    if not messages:
        raise InvalidRequest("messages is empty, at least one is needed", param="messages")
    # First of all: the checks below print what is wrong, and printing is recursive, too.
    check_shape(messages, "messages")
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _check_message(message, place)
        if message["role"] == "assistant":
            call_ids |= _call_ids(message, place)
        elif message["role"] == "tool":
            _check_result(message, place, call_ids)
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


def _call_ids(message: dict[str, Any], place: str) -> set[str]:
    calls = message.get("tool_calls")
    if calls is None:
        return set()
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place}.tool_calls must be a list", param=f"{place}.tool_calls")
    return {_call_id(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)}


def _call_id(call: object, place: str) -> str:
    """That its arguments are JSON is seen where the template's messages are made."""
    if not isinstance(call, dict):
        raise InvalidRequest(
            f'{place} must be an object: {{"id": "...", "type": "function", "function": {{"name": "...", '
            '"arguments": "..."}}',
            param=place,
        )
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{place} has no id: a non-empty string is needed", param=f"{place}.id")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f'{place}.type is {shown(call["type"])}, allowed is "function"', param=f"{place}.type")
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place}.function has no name: a non-empty string is needed", param=f"{place}.function")
    if not isinstance(function.get("arguments", ""), str | dict):
        raise InvalidRequest(
            f"{place}.function.arguments must be a JSON object in a string", param=f"{place}.function.arguments"
        )
    return call_id


def _check_result(message: dict[str, Any], place: str, call_ids: set[str]) -> None:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(
            f"{place} is of the role tool and has no tool_call_id: the id of the call whose result it is, is needed",
            param=f"{place}.tool_call_id",
        )
    if call_id not in call_ids:
        raise InvalidRequest(
            f"{place}.tool_call_id is {shown(call_id)}, but no assistant message before it has a call with this id",
            param=f"{place}.tool_call_id",
        )


def _check_part(part: object, path: str) -> None:
    if not isinstance(part, dict):
        raise InvalidRequest(f'{path} is no content part: send {{"type": "text", "text": "..."}}', param=path)
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
