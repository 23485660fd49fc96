"""Checks the input items of the Responses API, and translates them to chat messages.

First `checked_items` checks and normalizes each item. Then `messages_of` makes messages of these items and those of
earlier responses. Reasoning and tool calls become part of the assistant's message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.responses.response_types import (
    CallOutputItem,
    ContentPart,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImagePart,
    InputItem,
    InputTextPart,
    LocalShellCallItem,
    LocalShellCallOutputItem,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    SummaryTextPart,
)
from trioserve.api.turn.messages import image_part, joined_content
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = ["CALL_OUTPUTS", "ITEMS_MAX", "ItemReference", "checked_items", "messages_of"]

# The number of items in one body is limited, because each item becomes a message or a part of a message.
ITEMS_MAX = 10_000
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
CALL_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
IGNORED = frozenset({"web_search_call", "compaction_trigger", "additional_tools"})
"""Item types that are accepted and dropped. A client may have them in its history, and no model here can use them."""


NO_ID = ""
"""Id of an item whose response is not planned yet."""


class ItemReference(msgspec.Struct, frozen=True):
    """An input item that names an item of a stored response.

    Attributes:
        id: Id of that item.
    """

    id: str

    @property
    def type(self) -> str:
        return "item_reference"


def checked_items(given: str | list[dict[str, Any]] | None) -> list[InputItem | ItemReference]:
    """Check and normalize the items of a body's input. References are not resolved, and the items have no ids.

    Args:
        given: Field "input".

    Raises:
        InvalidRequest: An item is invalid. The error names the field by its path.
    """
    if given is None or given == []:
        return []
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    if len(given) > ITEMS_MAX:
        raise InvalidRequest(f"input has {len(given)} items, allowed are up to {ITEMS_MAX}", param="input")
    check_shape(given, "input")
    items = [_checked(item, f"input[{index}]") for index, item in enumerate(given)]
    return [item for item in items if item is not None]


def is_reference(item: dict[str, Any]) -> bool:
    """Return True if the item refers to an item of a stored response. The type may be missing.

    Args:
        item: Input item as the client sent it.
    """
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """Return chat messages in the shape of OpenAI's chat API.

    System messages at the beginning are merged with the instructions, because most templates allow only one.

    Args:
        items: Checked items without references.
        instructions: Field "instructions".
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names = {item.call_id: item.name for item in items if isinstance(item, FunctionCallItem | CustomToolCallItem)}
    for item in items:
        if isinstance(item, MessageItem):
            _add_message(messages, item)
        elif isinstance(item, ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary)
            _add_to_assistant(messages, "reasoning_content", text)
        elif isinstance(item, CallOutputItem):
            message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            if item.call_id in names:
                message["name"] = names[item.call_id]
            messages.append(message)
        else:
            name, arguments = _call(item)
            call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _add_to_assistant(messages, "tool_calls", [call])
    return messages


# --- checking ---


def _checked(item: dict[str, Any], path: str) -> InputItem | ItemReference | None:
    """Return the normalized item, or None if it is ignored."""
    kind = item.get("type")
    if kind is None:
        kind = "item_reference" if is_reference(item) else "message"
    if isinstance(kind, str) and kind in IGNORED:
        return None
    check = _CHECKS.get(kind) if isinstance(kind, str) else None
    if check is None:
        raise InvalidRequest(
            f"{path} is of type {str(kind)[:64]!r}, supported are: {', '.join(sorted(_CHECKS))}", param=f"{path}.type"
        )
    return check(item, path)


def _message(item: dict[str, Any], path: str) -> MessageItem:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role is {str(role)[:64]!r}, allowed are: {', '.join(ROLES)}", param=f"{path}.role"
        )
    part_of: Callable[[str], ContentPart] = _output_text if role == "assistant" else _input_text
    parts: list[ContentPart]
    content = item.get("content")
    if isinstance(content, str):
        parts = [part_of(content)]
    elif isinstance(content, list):
        takes_images = role == "user"
        parts = [
            _image(part, f"{path}.content[{index}]")
            if takes_images and isinstance(part, dict) and part.get("type") == "input_image"
            else part_of(_part_text(part, f"{path}.content[{index}]"))
            for index, part in enumerate(content)
        ]
    else:
        raise InvalidRequest(f"{path}.content must be a string or a list of parts", param=f"{path}.content")
    phase = item["phase"] if item.get("phase") in ("commentary", "final_answer") else UNSET
    return MessageItem(id=NO_ID, role=role, status="completed", content=parts, phase=phase)


def _input_text(text: str) -> InputTextPart:
    return InputTextPart(text=text)


def _output_text(text: str) -> OutputTextPart:
    return OutputTextPart(text=text)


def _part_text(part: object, path: str) -> str:
    given = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(given, str) or given not in TEXT_PARTS:
        raise InvalidRequest(
            f"{path} is of type {str(given)[:64]!r}, but only text is supported here: {', '.join(TEXT_PARTS)}",
            param=f"{path}.type",
        )
    text = part.get(TEXT_PARTS[given])
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.{TEXT_PARTS[given]} must be a string", param=f"{path}.{TEXT_PARTS[given]}")
    return text


def _image(part: dict[str, Any], path: str) -> InputImagePart:
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise InvalidRequest(
            f'{path}.image_url must be a string, "data:image/png;base64,...". The server does not read files',
            param=f"{path}.image_url",
        )
    return InputImagePart(image_url=url)


def _function_call(item: dict[str, Any], path: str) -> FunctionCallItem:
    return FunctionCallItem(
        id=NO_ID,
        call_id=_string(item, "call_id", path),
        name=_string(item, "name", path),
        arguments=_string(item, "arguments", path, may_be_empty=True),
        status="completed",
        namespace=_namespace(item),
    )


def _custom_tool_call(item: dict[str, Any], path: str) -> CustomToolCallItem:
    return CustomToolCallItem(
        id=NO_ID,
        call_id=_string(item, "call_id", path),
        name=_string(item, "name", path),
        input=_string(item, "input", path, may_be_empty=True),
        status="completed",
        namespace=_namespace(item),
    )


def _local_shell_call(item: dict[str, Any], path: str) -> LocalShellCallItem:
    action = item.get("action")
    if not isinstance(action, dict) or not isinstance(action.get("command"), list):
        raise InvalidRequest(f"{path}.action must be an object with a command, a list", param=f"{path}.action")
    return LocalShellCallItem(id=NO_ID, call_id=_string(item, "call_id", path), action=action, status="completed")


def _call_output(
    kind: type[FunctionCallOutputItem | CustomToolCallOutputItem | LocalShellCallOutputItem],
    item: dict[str, Any],
    path: str,
) -> FunctionCallOutputItem | CustomToolCallOutputItem | LocalShellCallOutputItem:
    output = item.get("output")
    if isinstance(output, list):
        output = [_input_text(_part_text(part, f"{path}.output[{index}]")) for index, part in enumerate(output)]
    elif not isinstance(output, str):
        raise InvalidRequest(f"{path}.output must be a string or a list of parts", param=f"{path}.output")
    # Codex sends the item local_shell_call_output with the call's id in the field "id".
    name = "call_id" if "call_id" in item or "id" not in item else "id"
    return kind(id=NO_ID, call_id=_string(item, name, path), output=output, status="completed")


def _reasoning(item: dict[str, Any], path: str) -> ReasoningItem:
    texts: dict[str, list[str]] = {}
    for field in ("summary", "content"):
        given = item.get(field) or []
        if not isinstance(given, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in given
        ):
            raise InvalidRequest(f"{path}.{field} must be a list of parts with a text", param=f"{path}.{field}")
        texts[field] = [part["text"] for part in given]
    return ReasoningItem(
        id=NO_ID,
        summary=[SummaryTextPart(text=text) for text in texts["summary"]],
        content=[ReasoningTextPart(text=text) for text in texts["content"]],
        status="completed",
    )


def _reference(item: dict[str, Any], path: str) -> ItemReference:
    return ItemReference(_string(item, "id", path))


def _string(item: dict[str, Any], field: str, path: str, *, may_be_empty: bool = False) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidRequest(
            f"{path}.{field} must be a {'' if may_be_empty else 'non-empty '}string", param=f"{path}.{field}"
        )
    return value


def _namespace(item: dict[str, Any]) -> str | UnsetType:
    namespace = item.get("namespace")
    return namespace if isinstance(namespace, str) else UNSET


_CHECKS: dict[str, Callable[[dict[str, Any], str], InputItem | ItemReference]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": partial(_call_output, FunctionCallOutputItem),
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": partial(_call_output, CustomToolCallOutputItem),
    "local_shell_call": _local_shell_call,
    "local_shell_call_output": partial(_call_output, LocalShellCallOutputItem),
    "reasoning": _reasoning,
    "item_reference": _reference,
}


# --- messages ---


def _add_message(messages: list[dict[str, Any]], item: MessageItem) -> None:
    if any(isinstance(part, InputImagePart) for part in item.content):
        pieces = [
            image_part(part.image_url) if isinstance(part, InputImagePart) else part.text for part in item.content
        ]
        messages.append({"role": item.role, "content": joined_content(pieces, "\n")})
        return
    text = _text(item.content)
    role = "system" if item.role == "developer" else item.role  # Few chat templates have the role "developer".
    if role == "assistant":
        _add_to_assistant(messages, "content", text)
    elif role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += "\n\n" + text
    else:
        messages.append({"role": role, "content": text})


def _add_to_assistant(messages: list[dict[str, Any]], field: str, value: Any) -> None:
    """Add a value to the last message if the assistant wrote it, and otherwise to a new message of the assistant.

    Within a message, reasoning comes before content, and content before tool calls. A value that would break this order
    gets a new message.
    """
    if not value:
        return
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (field != "tool_calls" and (last.get("tool_calls") or last.get("content"))):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if field == "tool_calls":
        last.setdefault("tool_calls", []).extend(value)
    elif last.get(field):
        last[field] += "\n" + value
    else:
        last[field] = value


def _call(item: FunctionCallItem | CustomToolCallItem | LocalShellCallItem) -> tuple[str, str]:
    """Return name and arguments of a call, as the model wrote them."""
    if isinstance(item, CustomToolCallItem):
        return item.name, json.dumps({"input": item.input}, ensure_ascii=False)
    if isinstance(item, LocalShellCallItem):
        action = {name: value for name, value in item.action.items() if name != "type" and value is not None}
        return "local_shell", json.dumps(action, ensure_ascii=False)
    return item.name, item.arguments


def _text(content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if not isinstance(part, InputImagePart))
