"""Translates Ollama's messages to OpenAI's chat shape, which chat templates expect. Does no I/O.

Calls in this API may have no ids. A tool result belongs to the first call of its function that has no result yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioserve.api.ollama.request_types import OllamaMessage
from trioserve.api.turn.image_parts import image_part, joined_content
from trioserve.contracts.errors import InvalidRequest

__all__ = ["chat_messages", "content_with_images"]


def content_with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return a message content with the images before the text.

    Args:
        text: The text.
        images: Images as base64, without the prefix of a data URL. Later code detects their format.
    """
    return joined_content([*(image_part(f"data:image/*;base64,{image}") for image in images or ()), text], "\n")


def chat_messages(messages: list[OllamaMessage], new_call_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """Translate messages to OpenAI's chat shape.

    Args:
        messages: The messages.
        new_call_id: Returns an id that the model's template accepts, from letters and digits that are unique in the
            conversation.

    Raises:
        InvalidRequest: A tool result has no call. The error names the message.
    """
    translated: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # calls without a result, by id and name
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        translated_message: dict[str, Any] = {
            "role": message.role,
            "content": content_with_images(message.content or "", message.images),
        }
        if message.thinking:
            translated_message["reasoning_content"] = message.thinking
        if message.role == "tool":
            call_id, name = _answered(message, unanswered, path)
            translated_message |= {"tool_call_id": call_id, "name": name}
        elif message.tool_calls:
            calls = [
                (call.id or new_call_id(f"{index:05}{position:04}"), call.function)
                for position, call in enumerate(message.tool_calls)
            ]
            unanswered = [(call_id, function.name) for call_id, function in calls]
            translated_message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for call_id, called in calls
            ]
        translated.append(translated_message)
    return translated


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]], path: str) -> tuple[str, str]:
    """Return id and name of the call that a tool result belongs to, and remove the call from `unanswered`."""
    for position, (call_id, name) in enumerate(unanswered):
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name):
            return unanswered.pop(position)
    raise InvalidRequest(
        f"{path} is a tool result without a matching call. Earlier calls without a result are: "
        + (", ".join(name for _, name in unanswered) or "none"),
        param=path,
    )
