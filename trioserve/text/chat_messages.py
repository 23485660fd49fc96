"""What a chat template is given as messages: OpenAI's shapes, checked, with content in the form the template takes."""

from __future__ import annotations

import enum
import json
from typing import Any

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt

__all__ = ["IMAGE_MARK", "ContentForm", "check_shape", "prepared_messages"]

ARGUMENT_DEPTH_MAX = 64  # templates walk and print arguments recursively; those of real tools are ten deep at most
ARGUMENT_VALUES_MAX = 100_000  # of all calls together; as Python objects they take ten times the room of their text
JSON_DEPTH_MAX = 64  # as for arguments; a schema of real tools is ten deep at most
JSON_VALUES_MAX = 100_000  # in one field; as Python objects they take ten times the room that they take on the wire
_VALUE_MARKS = (",", "[", "{")  # each value but the first comes after one


IMAGE_MARK = {"type": "image"}
"""A part of a message's content where an image is. The image itself no template sees."""


class ContentForm(enum.Enum):
    """What a template can do with a message's content."""

    STRING = "string"
    STRING_OR_PARTS = "string or parts"
    PARTS = "parts"


def prepared_messages(
    prompt: ChatPrompt, form: ContentForm, *, final_end: str, arguments_are_text: bool = False
) -> list[dict[str, Any]]:
    """Copies of the prompt's messages; the caller's are not changed.

    Text parts are joined by line breaks where the template wants a string, as in vLLM; a string is wrapped where it
    wants parts; an absent content is empty. Arguments of earlier tool calls, JSON in a string, become objects, if they
    are of bounded depth and number. With arguments_are_text they stay JSON text, or become it.
    final_end is put behind the final message's text if that message is to be continued. A mark of an image,
    {"type": "image"}, stays where it is.
    Raises InvalidRequest, naming the place, for anything but text and such marks.
    """
    if not prompt.messages:
        raise InvalidRequest("messages is empty, at least one message is needed", param="messages")
    messages = [_message(message, f"messages[{index}]", form) for index, message in enumerate(prompt.messages)]
    _parse_arguments(messages, are_text=arguments_are_text)
    if prompt.continue_final_message:
        _append_to_content(messages[-1], final_end)
    return messages


def _message(message: object, place: str, form: ContentForm) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place} must be an object with a role", param=place)
    return {**message, "content": _content(message.get("content"), f"{place}.content", form)}


def _content(content: object, place: str, form: ContentForm) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        text = content or ""
        return [{"type": "text", "text": text}] if form is ContentForm.PARTS else text
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} is {type(content).__name__}, allowed are text and a list of parts", param=place)
    if form is ContentForm.STRING:
        return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))
    return [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _part(part: object, place: str) -> dict[str, Any]:
    if part == IMAGE_MARK:
        return IMAGE_MARK
    return {"type": "text", "text": _part_text(part, place)}


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{place} is {type(part).__name__}, expected an object with a type", param=place)
    kind = part.get("type")
    if part == IMAGE_MARK:
        raise InvalidRequest(
            f"{place} is an image, and the chat template has no place for one in such a chat: send text alone",
            param=place,
        )
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{place} is of type {kind!r}; this model takes parts of type 'text'", param=place)
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{place} has no {kind}: it must be a string", param=place)
    return text


def _parse_arguments(messages: list[dict[str, Any]], *, are_text: bool) -> None:
    """Give each call the arguments that the template needs: an object for tojson, or JSON text to join to other text.
    OpenAI's API has JSON text. It is checked in either case."""
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
            # Counted before anything is made of them. What stands in strings is counted, too: it is no harm.
            value_count += sum(map(arguments.count, _VALUE_MARKS))
            if value_count > ARGUMENT_VALUES_MAX:
                raise InvalidRequest(
                    f"{place}.function.arguments: up to here the arguments of tool calls hold more than "
                    f"{ARGUMENT_VALUES_MAX} commas and opening brackets, and so too many values",
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
    """Check how many values a field holds and how deep they are nested, since templates walk and print all of them.

    Raises:
        InvalidRequest: more than JSON_VALUES_MAX values, or nested more than JSON_DEPTH_MAX deep.
    """
    count = 0
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
        count += len(level)
        if count > JSON_VALUES_MAX:
            raise InvalidRequest(f"{field} holds more than {JSON_VALUES_MAX} values", param=field)
    raise InvalidRequest(f"{field} is nested more than {JSON_DEPTH_MAX} deep", param=field)
