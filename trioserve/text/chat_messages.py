"""Checks the messages of a chat, in OpenAI's shapes, and converts their content to the format of the template."""

from __future__ import annotations

import enum
import json
from typing import Any, TypeGuard

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt

__all__ = ["ContentFormat", "check_shape", "prepared_messages"]

# Templates print arguments recursively. Arguments of real tools are nested at most ten levels deep.
ARGUMENT_DEPTH_MAX = 64
# Limit for all calls of a chat together. Python objects take ten times the memory of their JSON text.
ARGUMENT_VALUES_MAX = 100_000
# Templates print these values recursively, too. Schemas of real tools are nested at most ten levels deep.
JSON_DEPTH_MAX = 64
JSON_VALUES_MAX = 100_000  # Limit for one field. Python objects take ten times the memory of their JSON text.
_VALUE_MARKS = (",", "[", "{")  # One of these characters precedes each JSON value except the first.


# Parts of a message's content that stand for an image or a sound. Templates do not get the image or sound itself.
_MARKS = ({"type": "image"}, {"type": "audio"})


class ContentFormat(enum.Enum):
    """Format that a template expects for the content of a message."""

    STRING = "string"
    STRING_OR_PARTS = "string or parts"
    PARTS = "parts"


def prepared_messages(
    prompt: ChatPrompt, content_format: ContentFormat, *, final_end: str, arguments_are_text: bool = False
) -> list[dict[str, Any]]:
    """Copy and check the messages of a prompt, in the format that a template expects.

    If the template expects a string, text parts are joined by line breaks, as in vLLM. If it expects parts, a string
    becomes one part. Missing content becomes empty content. Marks of images and sounds, {"type": "image"} and {"type":
    "audio"}, are kept in their position. Arguments of earlier tool calls, which are JSON text, become objects. The
    caller's messages are not changed.

    Args:
        prompt: The chat.
        final_end: Text to append to the final message if the prompt asks to continue that message.
        arguments_are_text: True to keep arguments as JSON text, and to convert other arguments to JSON text.

    Raises:
        InvalidRequest: A message has a wrong shape, or content other than text and marks. Also raised if arguments are
            not JSON, or have too many or too deeply nested values. The message names the path of the field.
    """
    if not prompt.messages:
        raise InvalidRequest("messages is empty, at least one message is needed", param="messages")
    messages = []
    for index, message in enumerate(prompt.messages):
        messages.append(_message(message, f"messages[{index}]", content_format))
    _parse_arguments(messages, are_text=arguments_are_text)
    if prompt.continue_final_message:
        _append_to_content(messages[-1], final_end)
    return messages


def _message(message: object, place: str, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place} must be an object with a role", param=place)
    return {**message, "content": _content(message.get("content"), f"{place}.content", content_format)}


def _content(content: object, place: str, content_format: ContentFormat) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        text = content or ""
        return [{"type": "text", "text": text}] if content_format is ContentFormat.PARTS else text
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{place} is {type(content).__name__}, allowed are a string and a list of parts", param=place
        )
    if content_format is ContentFormat.STRING:
        return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _part(part: object, place: str) -> dict[str, Any]:
    if _is_mark(part):
        return part
    return {"type": "text", "text": _part_text(part, place)}


def _is_mark(part: object) -> TypeGuard[dict[str, Any]]:
    return part in _MARKS


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{place} is {type(part).__name__}, expected an object with a type", param=place)
    kind = part.get("type")
    if _is_mark(part):
        raise InvalidRequest(
            f"{place} is {kind}, and the chat template does not accept {kind} in this chat: send only text",
            param=place,
        )
    if kind in ("video", "video_url"):
        raise InvalidRequest(f"{place} is a video, but models here read no videos: send images from it", param=place)
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{place} is of type {kind!r}, this model accepts parts of type 'text'", param=place)
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{place} has no {kind}: it must be a string", param=place)
    return text


def _parse_arguments(messages: list[dict[str, Any]], *, are_text: bool) -> None:
    """Check the arguments of each call, and convert the arguments to the format that the template needs.

    In OpenAI's API, arguments are JSON text. A template that applies tojson to arguments needs an object. A template
    that joins arguments to other text needs JSON text.
    """
    value_count = 0
    for message_index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            continue
        message["tool_calls"] = calls = list(calls)
        for call_index, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if not isinstance(function, dict):
                continue
            if not isinstance(arguments, str):
                if are_text and isinstance(arguments, dict):
                    written = json.dumps(arguments, ensure_ascii=False)
                    calls[call_index] = {**call, "function": {**function, "arguments": written}}
                continue
            place = f"messages[{message_index}].tool_calls[{call_index}]"
            # Count the values before parsing. Commas and brackets in strings are counted, too, which does no harm.
            value_count += sum(map(arguments.count, _VALUE_MARKS))
            if value_count > ARGUMENT_VALUES_MAX:
                raise InvalidRequest(
                    f"{place}.function.arguments: the arguments of tool calls up to here have more than "
                    f"{ARGUMENT_VALUES_MAX} commas and opening brackets: send fewer values",
                    param=place,
                )
            parsed = _parsed(arguments, place)
            given = (arguments or "{}") if are_text else parsed
            calls[call_index] = {**call, "function": {**function, "arguments": given}}


def _parsed(arguments: str, place: str) -> object:
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError as error:
        raise InvalidRequest(f"{place}.function.arguments is not JSON: {error}", param=place) from None
    except RecursionError:
        raise _nested_too_deeply(place) from None
    level = [parsed]
    for _ in range(ARGUMENT_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return parsed
    raise _nested_too_deeply(place)


def _nested_too_deeply(place: str) -> InvalidRequest:
    return InvalidRequest(f"{place}.function.arguments is nested more than {ARGUMENT_DEPTH_MAX} deep", param=place)


def _append_to_content(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + text
    elif content and "text" in content[-1]:
        content[-1]["text"] += text
    else:
        raise InvalidRequest(
            "continue_final_message is set, but the final message has no text to continue", param="messages"
        )


def check_shape(value: object, field: str) -> None:
    """Check the number and the nesting depth of the values in a field, since templates print all values.

    Args:
        value: JSON value of the field.
        field: Name of the field, for error messages.

    Raises:
        InvalidRequest: The field has more than JSON_VALUES_MAX values, or values nested more than JSON_DEPTH_MAX deep.
    """
    count = 0
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        below: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                below += outer.values()
            elif isinstance(outer, list):
                below += outer
        if not below:
            return
        count += len(below)
        if count > JSON_VALUES_MAX:
            raise InvalidRequest(f"{field} has more than {JSON_VALUES_MAX} values", param=field)
        level = below
    raise InvalidRequest(f"{field} is nested more than {JSON_DEPTH_MAX} deep", param=field)
