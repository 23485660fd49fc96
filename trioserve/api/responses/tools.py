"""The tools of a body: which of them the model is shown, as what, and what its calls become.

The model is shown functions. A custom tool, whose input is free text, is shown as a function with one argument,
`input`; functions in a namespace are shown beside the others. A tool that a server would have to run (a web search,
an interpreter) is left out: a tool is an offer, and a model that is not shown it makes no use of it. So clients that
always send some, as Codex does, are served. Who wants such a tool to be used, by tool_choice, is refused.
"""

from __future__ import annotations

import enum
import json
from typing import Any

import msgspec

from trioserve.contracts.arguments import shown as shown_value
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape
from trioserve.text.tool_choice import FUNCTION_NAME, TOOLS_MAX, ToolChoice, ToolMode

__all__ = ["CallKind", "ShownTool", "Tools", "parse_tools"]

LISTED_MAX = 1024  # with those that are left out
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
    """kind: what a call of it becomes. namespace: in which the client keeps it."""

    kind: CallKind
    function: dict[str, Any]
    namespace: str | None = None


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """shown: by the name that the model calls. told: as the response tells them back. choice_told: the same for the
    choice."""

    shown: dict[str, ShownTool]
    told: list[dict[str, Any]]
    choice: ToolChoice
    choice_told: str | dict[str, Any]

    def as_functions(self) -> list[dict[str, Any]] | None:
        """In the shape of OpenAI's chat API."""
        return [{"type": "function", "function": tool.function} for tool in self.shown.values()] or None

    def kind_of(self, name: str) -> CallKind:
        tool = self.shown.get(name)
        return CallKind.FUNCTION if tool is None else tool.kind

    def namespace_of(self, name: str) -> str | None:
        tool = self.shown.get(name)
        return None if tool is None else tool.namespace


def parse_tools(given: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> Tools:
    """Raises InvalidRequest, naming the field by its path."""
    given = given or []
    if len(given) > LISTED_MAX:
        raise InvalidRequest(f"tools has {len(given)} entries, allowed are up to {LISTED_MAX}", param="tools")
    check_shape(given, "tools")
    shown: dict[str, ShownTool] = {}
    told = []
    for index, tool in enumerate(given):
        told += _add(shown, tool, f"tools[{index}]")
    if len(shown) > TOOLS_MAX:
        raise InvalidRequest(f"tools has {len(shown)} functions, allowed are up to {TOOLS_MAX}", param="tools")
    return Tools(
        shown=shown, told=told, choice=_parse_choice(choice, shown), choice_told="auto" if choice is None else choice
    )


def _add(shown: dict[str, ShownTool], tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """How the response tells it back; nothing for one that is left out."""
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
            place = f"{path}.tools[{index}]"
            if not isinstance(entry, dict) or entry.get("type") != "function":
                raise InvalidRequest(f"{place} must be a function", param=place)
            function = _function(entry, place)
            _show(shown, ShownTool(kind=CallKind.FUNCTION, function=function, namespace=name), place)
    else:
        raise InvalidRequest(
            f"{path} is of type {str(kind)[:64]!r}, supported are: {', '.join(SUPPORTED)}; left out, since a server "
            f"would have to run them, are: {', '.join(sorted(HOSTED))}",
            param=f"{path}.type",
        )
    return [tool]


def _show(shown: dict[str, ShownTool], tool: ShownTool, path: str) -> None:
    name = tool.function["name"]
    if name in shown:
        raise InvalidRequest(f"{path} has the name {name[:64]!r}, which another tool has, too", param=f"{path}.name")
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
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar" and isinstance(form.get("definition"), str):
        description += f"\nThe input has to follow this grammar:\n{form['definition']}"
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
                'tool_choice is "required", but tools has none that the model could call', param="tool_choice"
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
            raise InvalidRequest(f"tool_choice asks for {kind}, which is not run here", param="tool_choice")
    raise InvalidRequest(
        f"tool_choice is {json.dumps(choice)[:100]}, allowed are auto, none, required, "
        '{"type": "function", "name": ...}, {"type": "custom", "name": ...} and {"type": "allowed_tools", ...}',
        param="tool_choice",
    )
