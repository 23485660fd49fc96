"""Checks a request's tools and tool_choice, in the shapes of OpenAI's Chat Completions and Responses APIs."""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = ["FUNCTION_NAME", "TOOLS_MAX", "ToolChoice", "ToolMode", "checked_tools", "named_functions", "tool_choice_of"]

# Maximum number of tools of a request, as in OpenAI's API. Each tool takes prompt tokens, and adds a branch to the
# grammar of forced calls.
TOOLS_MAX = 128
NAME_CHARACTERS_MAX = 128
FUNCTION_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{NAME_CHARACTERS_MAX}}}")
TOOL_CHARACTERS_MAX = 262_144  # Largest size of one tool as JSON. The largest known tools have a tenth of this size.
_NAMES_ALLOWED = f"allowed are 1 to {NAME_CHARACTERS_MAX} letters, digits, underscores, dots and hyphens"


class ToolMode(enum.Enum):
    AUTO = "auto"  # The model decides whether it calls a function.
    NONE = "none"  # The prompt does not show the tools to the model.
    REQUIRED = "required"  # The response consists of one or more calls.
    NAMED = "named"  # The response is a call of the named function.


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that a request demands or forbids.

    Attributes:
        mode: Kind of choice.
        name: Name of the required function for ToolMode.NAMED, otherwise None.
        allowed: Names of the functions that may be called, or None for all.
    """

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def offered(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return the tools that the prompt shows and the model may call, or None if there are none.

        Args:
            tools: Checked tools of the request, or None.
        """
        if self.mode is ToolMode.NONE or not tools:
            return None
        if self.allowed is None:
            return tools
        return [tool for tool in tools if tool["function"]["name"] in self.allowed] or None


_MODES = {mode.value: ToolChoice(mode=mode) for mode in (ToolMode.AUTO, ToolMode.NONE, ToolMode.REQUIRED)}


def checked_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check the tools of a request and return them unchanged. Returns None if there are none.

    Args:
        tools: Tools in OpenAI's format, or None.

    Raises:
        InvalidRequest: A tool is not valid. `param` is the path of the field.
    """
    if not tools:
        return None
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {TOOLS_MAX} are allowed", param="tools")
    check_shape(tools, "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        function = _function_of(tool, place)
        _check_function(function, f"{place}.function")
        name = function["name"]
        if name in names:
            raise InvalidRequest(
                f"{place}.function.name is {name!r}, like that of an earlier tool: names must differ",
                param=f"{place}.function.name",
            )
        names.add(name)
        size = len(msgspec.json.encode(tool))
        if size > TOOL_CHARACTERS_MAX:
            raise InvalidRequest(f"{place} has {size} bytes, at most {TOOL_CHARACTERS_MAX} are allowed", param=place)
    return tools


def named_functions(tools: list[dict[str, Any]] | None) -> list[str]:
    """Return the names of checked tools, in order.

    Args:
        tools: Checked tools, or None.
    """
    return [tool["function"]["name"] for tool in tools or ()]


def tool_choice_of(value: object, tools: list[dict[str, Any]] | None) -> ToolChoice:
    """Convert the field tool_choice of a request.

    Args:
        value: Value of the field, or None if it was not sent.
        tools: Checked tools of the request, or None.

    Raises:
        InvalidRequest: The value is not valid, or contradicts the tools.
    """
    if value is None:
        return ToolChoice()
    choice = _parsed_choice(value)
    known = named_functions(tools)
    if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not known:
        raise InvalidRequest(
            "tool_choice asks for a call, but there are no tools: send tools, or omit tool_choice",
            param="tool_choice",
        )
    for name in (choice.name, *(choice.allowed or ())):
        if name is not None and name not in known:
            raise InvalidRequest(
                f"tool_choice names the function {shown(name)}, but tools has "
                f"{', '.join(known[:20]) if known else 'none'}",
                param="tool_choice",
            )
    return choice


def _function_of(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f'{place}.type is {shown(tool.get("type"))}, allowed is "function"', param=f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(
            f'{place}.function must be an object: {{"name": "...", "description": "...", "parameters": {{...}}}}',
            param=f"{place}.function",
        )
    return function


def _check_function(function: dict[str, Any], place: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.name is {shown(name)}, {_NAMES_ALLOWED}", param=f"{place}.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{place}.description must be a string", param=f"{place}.description")
    if function.get("strict") not in (None, False, True):
        raise InvalidRequest(f"{place}.strict must be true or false", param=f"{place}.strict")
    parameters = function.get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"{place}.parameters must be a JSON schema, an object", param=f"{place}.parameters")
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f'{place}.parameters.type is {shown(parameters["type"])}, allowed is "object": arguments have names',
            param=f"{place}.parameters.type",
        )


def _parsed_choice(value: object) -> ToolChoice:
    if isinstance(value, str) and value in _MODES:
        return _MODES[value]
    if isinstance(value, dict):
        if value.get("type") == "function":
            return ToolChoice(mode=ToolMode.NAMED, name=_name_in(value))
        if value.get("type") == "allowed_tools":
            return _allowed(value)
    raise InvalidRequest(
        f'tool_choice is {shown(value)}, allowed are "auto", "none", "required", '
        '{"type": "function", "function": {"name": "..."}} and '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}',
        param="tool_choice",
    )


def _allowed(value: dict[str, Any]) -> ToolChoice:
    inner = value.get("allowed_tools", value)
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    tools = inner.get("tools") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 1 <= len(tools) <= TOOLS_MAX:
        raise InvalidRequest(
            'tool_choice of the type "allowed_tools" needs a mode, "auto" or "required", and 1 to '
            f"{TOOLS_MAX} tools, each with a name",
            param="tool_choice",
        )
    return ToolChoice(mode=ToolMode(mode), allowed=tuple(_name_in(tool) for tool in tools))


def _name_in(value: object) -> str:
    """Return the function name in {"type": "function", "function": {"name"}} or {"type": "function", "name"}."""
    if isinstance(value, dict):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return name
    raise InvalidRequest(f"tool_choice names no function: {shown(value)} has no name", param="tool_choice")
