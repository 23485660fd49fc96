"""Messages of Ollama's shape as messages of OpenAI's chat shape, for which chat templates are written. Pure.

Calls have no ids in this API, or need none: a result belongs to the first call of its name that has none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioserve.api.ollama.request_types import OllamaMessage
from trioserve.api.turn.image_parts import image_part, joined_content
from trioserve.contracts.errors import InvalidRequest

__all__ = ["chat_messages", "content_with_images"]


def content_with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """images: base64 without what a data URL has before it; they come before the text. What they are, their first bytes
    tell."""
    return joined_content([*(image_part(f"data:image/*;base64,{image}") for image in images or ()), text], "\n")


def chat_messages(messages: list[OllamaMessage], new_call_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """new_call_id: of letters and digits that are unique in the conversation, an id that its template takes. Raises
    InvalidRequest, naming the place, for results without their calls."""
    translated: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # calls without a result, by id and name
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        said: dict[str, Any] = {
            "role": message.role,
            "content": content_with_images(message.content or "", message.images),
        }
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.role == "tool":
            call_id, name = _answered(message, unanswered, place)
            said |= {"tool_call_id": call_id, "name": name}
        elif message.tool_calls:
            calls = [
                (call.id or new_call_id(f"{index:05}{position:04}"), call.function)
                for position, call in enumerate(message.tool_calls)
            ]
            unanswered = [(call_id, function.name) for call_id, function in calls]
            said["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for call_id, called in calls
            ]
        translated.append(said)
    return translated


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]], place: str) -> tuple[str, str]:
    """Of the call whose result this is, its id and name; it is not among the unanswered any more."""
    for position, (call_id, name) in enumerate(unanswered):
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name):
            return unanswered.pop(position)
    raise InvalidRequest(
        f"{place} is the result of a tool, and the calls before it that have none yet are: "
        + (", ".join(name for _, name in unanswered) or "none"),
        param=place,
    )
