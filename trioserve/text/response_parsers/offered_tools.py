"""Tools that a request offers, the JSON types that their schemas allow for an argument, and the request's tool_choice.

The checks accept the shapes of OpenAI's Chat Completions and Responses APIs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.chat_messages import check_shape

__all__ = [
    "ANY_TYPE",
    "FUNCTION_NAME",
    "OfferedTool",
    "TOOLS_MAX",
    "ToolChoice",
    "ToolMode",
    "argument_schemas",
    "argument_types",
    "checked_tools",
    "named_functions",
    "offered_tools",
    "tool_choice_of",
    "tools_by_name",
]


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One function that a model may call.

    Attributes:
        name: Name of the function.
        description: Description for the model, or None.
        parameters: JSON schema of an object with the arguments, or None.
        strict: True if arguments must always follow the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


def tools_by_name(tools: Iterable[OfferedTool]) -> dict[str, OfferedTool]:
    """Return tools by name. If several tools have the same name, the last tool counts."""
    return {tool.name: tool for tool in tools}


def offered_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[OfferedTool]:
    """Convert tools from OpenAI's format.

    Args:
        tools: Checked tools of a request, or None.
    """
    return [
        OfferedTool(
            name=function["name"],
            description=function.get("description"),
            parameters=function.get("parameters"),
            strict=bool(function.get("strict")),
        )
        for tool in tools or ()
        for function in [tool["function"]]
    ]


ANY_TYPE: Final[frozenset[str]] = frozenset()  # This value stands for a schema that names no type.
_STEPS_MAX: Final = 64  # Maximum number of references and alternatives to follow, since a schema may refer to itself.
_OF_PYTHON: Final = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
# These are other names of types that some clients send and vLLM accepts.
_ALIASES: Final = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}


def argument_schemas(tool: OfferedTool | None) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each argument that has one, in the order of the tool's schema.

    Args:
        tool: The tool, or None.
    """
    properties = (tool.parameters or {}).get("properties") if tool is not None else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}


def argument_types(tool: OfferedTool | None, name: str) -> frozenset[str] | None:
    """Return the JSON types that an argument may have.

    ANY_TYPE if the argument's schema names no type. None if the argument has no schema.

    Args:
        tool: The tool, or None.
        name: Name of the argument.
    """
    schema = argument_schemas(tool).get(name)
    if schema is None:
        return None
    assert tool is not None
    root = tool.parameters or {}
    types: set[str] = set()
    waiting: list[Mapping[str, Any]] = [schema]
    for _ in range(_STEPS_MAX):
        if not waiting:
            return frozenset(types)
        found = _types_here(waiting.pop(), root, waiting)
        if found is None:
            return ANY_TYPE
        types |= found
    return ANY_TYPE


def _types_here(
    schema: Mapping[str, Any], root: Mapping[str, Any], waiting: list[Mapping[str, Any]]
) -> set[str] | None:
    """Return the types that one part of a schema names, or None if this part allows any type.

    Adds referenced parts to `waiting`.
    """
    declared = schema.get("type")
    if isinstance(declared, str):
        return {_ALIASES.get(declared, declared)}
    if isinstance(declared, list):
        return {_ALIASES.get(name, name) for name in declared if isinstance(name, str)}
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        return {_OF_PYTHON.get(type(value), "array" if isinstance(value, list) else "object") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            waiting += [part for part in schema[key] if isinstance(part, Mapping)]
            return set()
    target = _referred(schema.get("$ref"), root)
    if target is None:
        if "properties" in schema:
            return {"object"}
        return {"array"} if "items" in schema else None
    waiting.append(target)
    return set()


def _referred(reference: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: object = root
    for step in reference[2:].split("/")[:8]:
        target = target.get(step) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else None


# Maximum number of tools of a request, as in OpenAI's API. Each tool takes prompt tokens, and adds a branch to the
# grammar of forced calls.
TOOLS_MAX = 128
NAME_CHARACTERS_MAX = 128
FUNCTION_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{NAME_CHARACTERS_MAX}}}")
TOOL_CHARACTERS_MAX = 262_144  # Largest size of one tool as JSON. The largest known tools have a tenth of this size.
_NAMES_ALLOWED = f"allowed are 1 to {NAME_CHARACTERS_MAX} letters, digits, underscores, dots and hyphens"


class ToolMode(enum.Enum):
    AUTO = "auto"  # The model decides whether it calls a function.
    NONE = "none"  # The response has no calls. The prompt still shows the tools.
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

    def shown(self, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Return the tools that the prompt shows, or None if there are none.

        With ToolMode.NONE, the prompt shows all tools, as in vLLM, but a call in the response is text. So a turn
        without calls keeps the cached prefix of the conversation.

        Args:
            tools: Checked tools of the request, or None.
        """
        if self.allowed is None:
            return tools or None
        return [tool for tool in tools or () if tool["function"]["name"] in self.allowed] or None


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
