"""Tools that a request offers, and the JSON types that their schemas allow for an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

__all__ = ["OfferedTool", "offered_tools", "tools_by_name", "ANY_TYPE", "argument_schemas", "argument_types"]


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
    """Return tools by name. If several tools have the same name, the last tool counts.

    Args:
        tools: The tools.
    """
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
