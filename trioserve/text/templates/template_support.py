"""Finds which parts of a chat a template shows: tools, calls, results, system messages.

Parts that the template does not show become plain messages.

A template that drops a part raises no error, and the model never gets that part. So each template is rendered a few
times with short chats. The parts of these chats are unique words that can be found in the rendered text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import ContentFormat, prepared_messages
from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool, offered_tools
from trioserve.text.response_parts import WholeCall

__all__ = [
    "plain_messages",
    "tool_result_text",
    "tools_text",
    "TemplateSupport",
    "find_support",
    "supports_tools_of",
    "with_supported_parts",
]

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, write the name of the function and its arguments exactly like this:
{example}"""
_EXAMPLE = WholeCall("function_name", '{"argument_name": "value"}')


def tools_text(tool_family: str, tools: Sequence[OfferedTool]) -> str:
    """Return the text for the system message that describes the tools and the format in which to call them.

    Args:
        tool_family: Family whose format is described.
    """
    signatures = "\n".join(json.dumps(_signature(tool), ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(
        signatures=signatures, example=TOOL_FAMILIES[tool_family].call_format.written([_EXAMPLE])
    )


def tool_result_text(content: str) -> str:
    """Return the text for a message that gives the model the result of a call.

    Args:
        content: The result.
    """
    return f"<tool_response>\n{content}\n</tool_response>"


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[OfferedTool], tool_family: str
) -> list[dict[str, Any]]:
    """Convert messages so that they contain no fields for tools. The given messages are not changed.

    The description of the tools is appended to the system message. Calls follow the content of their message.
    Consecutive results become one message of the user.

    Args:
        messages: Messages in OpenAI's shapes. Content is text or None. Arguments of calls are JSON text or objects.
        tools: The tools to describe, possibly none.
        tool_family: Family whose format is used for calls.
    """
    plain: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") in ("tool", "function")
        if is_result:
            text = tool_result_text(message.get("content") or "")
            if follows_result:
                plain[-1]["content"] += "\n" + text
            else:
                plain.append({"role": "user", "content": text})
        elif calls := _calls_of(message):
            said = message.get("content") or ""
            text = TOOL_FAMILIES[tool_family].call_format.written(calls)
            rest = {key: value for key, value in message.items() if key not in ("tool_calls", "function_call")}
            plain.append({**rest, "content": f"{said}\n{text}" if said else text})
        else:
            plain.append(dict(message))
        follows_result = is_result
    return _with_system_text(plain, tools_text(tool_family, tools)) if tools else plain


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0].get("role") in ("system", "developer"):
        first = messages[0]
        said = first.get("content") or ""
        return [{**first, "content": f"{said}\n\n{text}" if said else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_of(message: Mapping[str, Any]) -> list[WholeCall]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls and message.get("function_call"):
        calls = [message["function_call"]]
    return [WholeCall(call["name"], _arguments_text(call.get("arguments"))) for call in calls]


def _arguments_text(arguments: object) -> str:
    return arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _signature(tool: OfferedTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]
"""Renders messages and tools to text. Raises any exception that the template raises."""

# No template contains these words of letters and digits, and no escaping changes the words.
_SYSTEM, _TOOL, _CALLED, _RESULT, _SAID = "f5e4dsystem", "f5e4dtool", "f5e4dcalled", "f5e4dresult", "f5e4dsaid"

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
_ARGUMENTS, _ARGUMENTS_TEXT = {"what": "it"}, '{"what": "it"}'
_REPR = repr(_ARGUMENTS)
_HELP = {"role": "system", "content": "Help."}
_ANSWER = {"role": "assistant", "content": "Yes?"}


class TemplateSupport(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a chat that a template shows, or refuses with an error.

    Attributes:
        tools: True if the template shows the offered tools.
        history: True if the template shows earlier calls and their results in a request with tools.
        bare_history: True if the template shows earlier calls and their results in a request without tools.
        system: True if the template shows a system message at the beginning.
        keeps_system: True if the template shows or refuses a system message at the beginning.
        keeps_second_system: True if the template shows or refuses a second system message directly after the first.
        keeps_later_system: True if the template shows or refuses a system message after other messages.
        keeps_said: True if the template shows or refuses the content of a message that has calls.
        developer: True if the template shows messages of the role developer.
        arguments_are_text: True if the template needs the arguments of calls as JSON text, since it joins them to other
            text.
    """

    tools: bool
    history: bool
    bare_history: bool
    system: bool
    keeps_system: bool
    keeps_second_system: bool
    keeps_later_system: bool
    keeps_said: bool
    developer: bool
    arguments_are_text: bool


def find_support(
    render: Render, *, variables: Collection[str], source: str, content_format: ContentFormat
) -> TemplateSupport:
    """Render short chats to find which parts the template shows.

    Args:
        render: Renders messages and tools.
        variables: Variables that the template reads but does not set.
        source: Text of the template. If the template refuses all these chats, it is assumed to show the parts that its
            text mentions.
        content_format: Format that the template expects for the content of messages.
    """

    def text_of(
        *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, arguments_are_text: bool = False
    ) -> str | None:
        prompt = ChatPrompt(messages=list(messages))
        try:
            return render(
                prepared_messages(prompt, content_format, final_end="", arguments_are_text=arguments_are_text), tools
            )
        except Exception:  # An untrusted template may refuse this chat with any exception.
            return None

    def calling(*, are_text: bool, tools: list[dict[str, Any]] | None = None, said: str = "") -> str | None:
        return text_of(_USER, *_call_and_result(said), tools=tools, arguments_are_text=are_text)

    def keeps(text: str | None) -> bool:
        return text is None or _SYSTEM in text

    with_tools = text_of(_USER, tools=_TOOLS)
    if with_tools is None:
        with_tools = text_of(_HELP, _USER, tools=_TOOLS)
    are_text = False
    called, bare_called = calling(are_text=False, tools=_TOOLS), calling(are_text=False)
    if _is_unfit(called) and _is_unfit(bare_called):
        texts = calling(are_text=True, tools=_TOOLS), calling(are_text=True)
        if any(text is not None and _ARGUMENTS_TEXT in text for text in texts):
            are_text = True
            called, bare_called = texts
    said = calling(are_text=are_text, tools=_TOOLS, said=_SAID) or calling(are_text=are_text, said=_SAID)
    prompt = {"role": "system", "content": _SYSTEM}
    system = text_of(prompt, _USER)
    developer = text_of({"role": "developer", "content": _SYSTEM}, _USER) if "developer" in source else None
    return TemplateSupport(
        tools="tools" in variables and (with_tools is None or _TOOL in with_tools),
        history="tool_calls" in source if called is None else _shows_history(called),
        bare_history="tool_calls" in source if called is bare_called is None else _shows_history(bare_called),
        system=system is not None and _SYSTEM in system,
        keeps_system=keeps(system),
        keeps_second_system=keeps(text_of(_HELP, prompt, _USER)),
        keeps_later_system=keeps(text_of(_USER, _ANSWER, prompt, _USER)),
        keeps_said=said is None or _SAID in said,
        developer=developer is not None and _SYSTEM in developer,
        arguments_are_text=are_text,
    )


def with_supported_parts(prompt: ChatPrompt, support: TemplateSupport, tool_family: str | None) -> ChatPrompt:
    """Convert the parts of a chat that the template does not show to plain messages.

    Args:
        prompt: The chat.
        support: Parts that the template shows.
        tool_family: Format for tools and calls. None to leave tools and calls unchanged.
    """
    messages = prompt.messages
    if not support.developer and any(message.get("role") == "developer" for message in messages):
        messages = [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]
    messages = _kept_system(messages, support)
    if messages is not prompt.messages:
        prompt = msgspec.structs.replace(prompt, messages=messages)
    return prompt if tool_family is None else _with_plain_tools(prompt, support, tool_family)


def supports_tools_of(prompt: ChatPrompt, support: TemplateSupport) -> bool:
    """Return True if the template shows the tools of a chat, and their calls and results.

    Args:
        prompt: The chat.
        support: Parts that the template shows.
    """
    shows_tools = support.tools or not prompt.tools
    has_history = any(message.get("tool_calls") or message.get("role") == "tool" for message in prompt.messages)
    shows_history = support.history if prompt.tools else support.bare_history
    return shows_tools and (shows_history or not has_history)


def _with_plain_tools(prompt: ChatPrompt, support: TemplateSupport, tool_family: str) -> ChatPrompt:
    if supports_tools_of(prompt, support):
        return prompt if support.keeps_said else _with_separate_content(prompt)
    shows_tools = support.tools or not prompt.tools
    messages = prepared_messages(
        msgspec.structs.replace(prompt, continue_final_message=False), ContentFormat.STRING, final_end=""
    )
    plain = plain_messages(messages, [] if shows_tools else offered_tools(prompt.tools), tool_family)
    if not shows_tools and not support.system:
        plain = _without_system(plain)
    return msgspec.structs.replace(prompt, messages=plain, tools=prompt.tools if shows_tools else None)


def _with_separate_content(prompt: ChatPrompt) -> ChatPrompt:
    """Move the content of each message with calls into a separate message before it."""
    messages: list[dict[str, Any]] = []
    for message in prompt.messages:
        if message.get("tool_calls") and message.get("content"):
            messages.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {**message, "content": ""}
        messages.append(message)
    return msgspec.structs.replace(prompt, messages=messages)


def _kept_system(messages: list[dict[str, Any]], support: TemplateSupport) -> list[dict[str, Any]]:
    """Move system messages that the template would drop into the first system message or into the next user message."""
    if support.keeps_system and support.keeps_second_system and support.keeps_later_system:
        return messages
    kept: list[dict[str, Any]] = []
    waiting: list[Any] = []  # Content to add to the next message of the user.
    for message in messages:
        role = message.get("role")
        follows_first = len(kept) == 1 and kept[0].get("role") == "system"
        if role == "system" and not kept and not waiting and support.keeps_system:
            kept.append(message)
        elif role == "system" and follows_first and not waiting:
            if support.keeps_second_system:
                kept.append(message)
            else:
                kept[0] = {**kept[0], "content": _joined(kept[0].get("content"), message.get("content"))}
        elif role == "system":
            if kept and support.keeps_later_system:
                kept.append(message)
            else:
                waiting.append(message.get("content"))
        else:
            if waiting and role != "user":
                kept += ({"role": "user", "content": content} for content in waiting)
                waiting.clear()
            for content in reversed(waiting):
                message = {**message, "content": _joined(content, message.get("content"))}
            waiting.clear()
            kept.append(message)
    kept += ({"role": "user", "content": content} for content in waiting)
    return kept


def _joined(first: Any, second: Any) -> Any:
    """Join the contents of two messages with a blank line between them."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return f"{first or ''}\n\n{second or ''}".strip("\n")


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _call_and_result(said: str) -> list[dict[str, Any]]:
    call = {"id": "f5e4dcall", "type": "function", "function": {"name": _CALLED, "arguments": _ARGUMENTS}}
    return [
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "name": _CALLED, "tool_call_id": call["id"]},
    ]


def _shows_history(text: str | None) -> bool:
    return text is not None and _CALLED in text and _RESULT in text


def _is_unfit(text: str | None) -> bool:
    """Return True if the template failed when arguments were an object, or printed this object in Python's notation."""
    return text is None or _REPR in text


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the text of the system message at the beginning of the user's message."""
    system, *rest = messages
    if not rest or rest[0].get("role") != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
