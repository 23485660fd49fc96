"""The tools that a request offers, as the parsers, the prompt texts and the grammars of all families need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["OfferedTool", "offered_tools", "tools_by_name"]


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """One function. parameters: a JSON schema of an object, or None if the caller gave none. strict: the caller wants
    arguments that the schema accepts, always."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


def tools_by_name(tools: Iterable[OfferedTool]) -> dict[str, OfferedTool]:
    """The last one of a name counts."""
    return {tool.name: tool for tool in tools}


def offered_tools(tools: Iterable[Mapping[str, Any]] | None) -> list[OfferedTool]:
    """Convert tools from OpenAI's shape.

    Args:
        tools: checked tools of a request. None: the request offers none.
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
