"""Tools of the Responses API: translates them to functions for the model, and function calls back to calls of the API.

The model sees functions only. A custom tool, whose input is free text, becomes a function with one argument, `input`.
Functions in a namespace are listed with the others. Tools that a server would have to run (web search, interpreter) are
left out: a tool is an offer, and the model does not call a tool that it does not see. So the server accepts clients
that always send such tools, for example Codex. A tool_choice that requires such a tool is refused.
"""

from __future__ import annotations

import enum
import json
from typing import Any

import msgspec

from trioserve.contracts.arguments import shown as shown_value
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape
from trioserve.text.response_parsers.offered_tools import FUNCTION_NAME, TOOLS_MAX, ToolChoice, ToolMode

__all__ = ["CallKind", "ShownTool", "Tools", "parse_tools"]

LISTED_MAX = 1024  # The limit counts all tools of a request, including tools that the model does not see.
HOSTED = frozenset(
    {
        "web_search",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "web_search_2025_08_26",
        "file_search",
        "code_interpreter",
        "image_generation",
        "computer",
        "computer_use_preview",
        "mcp",
        "shell",
        "apply_patch",
        "tool_search",
        "programmatic_tool_calling",
    }
)
SUPPORTED = ("function", "custom", "local_shell", "namespace")

LOCAL_SHELL: dict[str, Any] = {
    "name": "local_shell",
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class CallKind(enum.Enum):
    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    LOCAL_SHELL = "local_shell_call"


class ShownTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model sees.

    Attributes:
        kind: Kind of call that the API reports for calls of the function.
        function: Function in the shape of OpenAI's chat API.
        namespace: Namespace of the function in the request. None if it has none.
    """

    kind: CallKind
    function: dict[str, Any]
    namespace: str | None = None


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request.

    Attributes:
        shown: Functions that the model sees, by name.
        echo: Tools as the response object repeats them.
        choice: Tools that the model may or must call.
        choice_echo: tool_choice as the response object repeats it.
    """

    shown: dict[str, ShownTool]
    echo: list[dict[str, Any]]
    choice: ToolChoice
    choice_echo: str | dict[str, Any]

    def as_functions(self) -> list[dict[str, Any]] | None:
        """Return the tools in the shape of OpenAI's chat API, or None if there are none."""
        return [{"type": "function", "function": tool.function} for tool in self.shown.values()] or None

    def kind_of(self, name: str) -> CallKind:
        tool = self.shown.get(name)
        return CallKind.FUNCTION if tool is None else tool.kind

    def namespace_of(self, name: str) -> str | None:
        tool = self.shown.get(name)
        return None if tool is None else tool.namespace


def parse_tools(given: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> Tools:
    """Check and translate the tools of a request.

    Args:
        given: Field "tools".
        choice: Field "tool_choice".

    Raises:
        InvalidRequest: A tool or the choice is invalid. The error names the field by its path.
    """
    given = given or []
    if len(given) > LISTED_MAX:
        raise InvalidRequest(f"tools has {len(given)} entries, allowed are up to {LISTED_MAX}", param="tools")
    check_shape(given, "tools")
    shown: dict[str, ShownTool] = {}
    echo = []
    for index, tool in enumerate(given):
        echo += _add(shown, tool, f"tools[{index}]")
    if len(shown) > TOOLS_MAX:
        raise InvalidRequest(f"tools has {len(shown)} functions, allowed are up to {TOOLS_MAX}", param="tools")
    return Tools(
        shown=shown, echo=echo, choice=_parse_choice(choice, shown), choice_echo="auto" if choice is None else choice
    )


def _add(shown: dict[str, ShownTool], tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Add a tool to `shown`.

    Returns:
        The tool as the response object repeats it, or an empty list if the tool is ignored.
    """
    kind = tool.get("type")
    if isinstance(kind, str) and kind in HOSTED:
        return []
    if kind == "function":
        function = _function(tool, path)
        _show(shown, ShownTool(kind=CallKind.FUNCTION, function=function), path)
        return [{"strict": None, "description": None, "parameters": None, **tool}]
    if kind == "custom":
        _show(shown, ShownTool(kind=CallKind.CUSTOM, function=_custom(tool, path)), path)
    elif kind == "local_shell":
        _show(shown, ShownTool(kind=CallKind.LOCAL_SHELL, function=LOCAL_SHELL), path)
    elif kind == "namespace":
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(inner, list):
            raise InvalidRequest(f"{path} needs a name and a list of tools", param=path)
        for index, entry in enumerate(inner):
            inner_path = f"{path}.tools[{index}]"
            if not isinstance(entry, dict) or entry.get("type") != "function":
                raise InvalidRequest(f"{inner_path} must be a function", param=inner_path)
            function = _function(entry, inner_path)
            _show(shown, ShownTool(kind=CallKind.FUNCTION, function=function, namespace=name), inner_path)
    else:
        raise InvalidRequest(
            f"{path} is of type {str(kind)[:64]!r}, supported are: {', '.join(SUPPORTED)}. Accepted and ignored, "
            f"because a server would have to run them, are: {', '.join(sorted(HOSTED))}",
            param=f"{path}.type",
        )
    return [tool]


def _show(shown: dict[str, ShownTool], tool: ShownTool, path: str) -> None:
    name = tool.function["name"]
    if name in shown:
        raise InvalidRequest(
            f"{path} has the name {name[:64]!r}, but another tool has the same name", param=f"{path}.name"
        )
    shown[name] = tool


def _function(tool: dict[str, Any], path: str) -> dict[str, Any]:
    name = tool.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name is {shown_value(name)}, allowed are letters, digits, underscores, dots and hyphens",
            param=f"{path}.name",
        )
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{path}.parameters must be a JSON schema, an object", param=f"{path}.parameters")
    function = {"name": tool["name"], "parameters": parameters or {"type": "object", "properties": {}}}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return function


def _custom(tool: dict[str, Any], path: str) -> dict[str, Any]:
    function = _function({"name": tool.get("name")}, path)
    description = tool["description"] if isinstance(tool.get("description"), str) else ""
    syntax = tool.get("format")
    if isinstance(syntax, dict) and syntax.get("type") == "grammar" and isinstance(syntax.get("definition"), str):
        description += f"\nThe input has to follow this grammar:\n{syntax['definition']}"
    return {
        **function,
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }


def _parse_choice(choice: str | dict[str, Any] | None, shown: dict[str, ShownTool]) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice()
    if choice == "none":
        return ToolChoice(mode=ToolMode.NONE)
    if choice == "required":
        if not shown:
            raise InvalidRequest(
                'tool_choice is "required", but tools has no tool that the model can call', param="tool_choice"
            )
        return ToolChoice(mode=ToolMode.REQUIRED)
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind in ("function", "custom", "local_shell"):
            name = "local_shell" if kind == "local_shell" else choice.get("name")
            if not isinstance(name, str) or name not in shown:
                raise InvalidRequest(
                    f"tool_choice names {str(name)[:64]!r}, which is not among the tools", param="tool_choice.name"
                )
            return ToolChoice(mode=ToolMode.NAMED, name=name)
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            allowed = [tool.get("name") for tool in choice["tools"] if isinstance(tool, dict)]
            names = tuple(name for name in allowed if isinstance(name, str) and name in shown)
            is_required = choice.get("mode") == "required"
            if is_required and not names:
                raise InvalidRequest("tool_choice allows none of the tools", param="tool_choice.tools")
            return ToolChoice(mode=ToolMode.REQUIRED if is_required else ToolMode.AUTO, allowed=names)
        if isinstance(kind, str) and kind in HOSTED:
            raise InvalidRequest(f"tool_choice asks for {kind}, but this server does not run it", param="tool_choice")
    raise InvalidRequest(
        f"tool_choice is {json.dumps(choice)[:100]}, allowed are auto, none, required, "
        '{"type": "function", "name": ...}, {"type": "custom", "name": ...} and {"type": "allowed_tools", ...}',
        param="tool_choice",
    )
