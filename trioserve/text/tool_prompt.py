"""Writes tools, calls and their results as plain messages, for chat templates that do not show them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trioserve.text.joined_response import WholeCall
from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool

__all__ = ["plain_messages", "tool_result_text", "tools_text"]

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
        tools: The tools.
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
