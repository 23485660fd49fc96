"""Whether a chat template shows tools, calls and their results at all; where it does not, they become plain messages.

A template that drops them says nothing of it: the model would be asked about tools that it has never seen. So each
template is rendered once with a chat whose parts can be found again in its text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import ContentForm, prepared_messages
from trioserve.text.response_families import offered_tools
from trioserve.text.tool_prompt import plain_messages

__all__ = ["TemplatePlaces", "find_places", "in_places"]

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""A template's text for messages and tools. Raises whatever the template raises."""

# Words that no template has, of letters and digits, which nothing escapes.
_SYSTEM, _TOOL, _CALLED, _RESULT = "f5e4dsystem", "f5e4dtool", "f5e4dcalled", "f5e4dresult"

_USER = {"role": "user", "content": "Hi"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Tells something.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "Of what."}}},
        },
    }
]
_CALL = {"id": "f5e4dcall", "type": "function", "function": {"name": _CALLED, "arguments": {"what": "it"}}}
_CALLING: list[dict[str, Any]] = [
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": _CALL["id"]},
]


class TemplatePlaces(msgspec.Struct, frozen=True, kw_only=True):
    """What of a chat with tools a template shows: the tools themselves, and earlier calls with their results. system:
    it takes a message of the system."""

    tools: bool
    history: bool
    system: bool


def find_places(render: Render, *, variables: Collection[str], source: str, form: ContentForm) -> TemplatePlaces:
    """variables: those that the template reads and does not set. A template that takes none of the chats here is
    believed in what its source speaks of."""
    with_tools = _first_text(
        lambda: render(_shaped([_USER], form), _TOOLS),
        lambda: render(_shaped([{"role": "system", "content": "Help."}, _USER], form), _TOOLS),
    )
    calling = _first_text(lambda: render(_shaped(_CALLING, form), _TOOLS))
    system = _first_text(lambda: render(_shaped([{"role": "system", "content": _SYSTEM}, _USER], form), None))
    return TemplatePlaces(
        tools="tools" in variables and (with_tools is None or _TOOL in with_tools),
        history="tool_calls" in source if calling is None else _CALLED in calling and _RESULT in calling,
        system=system is not None and _SYSTEM in system,
    )


def in_places(prompt: ChatPrompt, places: TemplatePlaces, tool_family: str) -> ChatPrompt:
    """The prompt, with what the template has no place for as plain messages in the family's format."""
    shows_tools = places.tools or not prompt.tools
    has_history = any(message.get("tool_calls") or message.get("role") == "tool" for message in prompt.messages)
    if shows_tools and (places.history or not has_history):
        return prompt
    messages = prepared_messages(
        msgspec.structs.replace(prompt, continue_final_message=False), ContentForm.STRING, final_end=""
    )
    plain = plain_messages(messages, [] if shows_tools else offered_tools(prompt.tools), tool_family)
    if not shows_tools and not places.system:
        plain = _without_system(plain)
    return msgspec.structs.replace(prompt, messages=plain, tools=prompt.tools if shows_tools else None)


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the system would say stands before what the user says."""
    system, *rest = messages
    if not rest or rest[0].get("role") != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def _shaped(messages: list[dict[str, Any]], form: ContentForm) -> list[dict[str, Any]]:
    return prepared_messages(ChatPrompt(messages=messages), form, final_end="")


def _first_text(*renderings: Callable[[], str]) -> str | None:
    for rendering in renderings:
        try:
            return rendering()
        except Exception:  # a foreign program that refuses this chat, for whatever reason
            continue
    return None
