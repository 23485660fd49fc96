"""Tools that a request offers, as parsers, prompts and grammars of all families use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["OfferedTool", "offered_tools", "tools_by_name"]


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
    """Return tools by name. Of several tools with one name, the last counts.

    Args:
        tools: The tools.
    """
    return {tool.name: tool for tool in tools}


def offered_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[OfferedTool]:
    """Convert tools from OpenAI's shape.

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
