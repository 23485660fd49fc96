"""Provides fixtures for the tests of all families: they parse a text as a whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec
import pytest

from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import JoinedResponse, ToolCallArguments, ToolCallBegin, ToolCallEnd

WEATHER = OfferedTool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
)
TIME = OfferedTool(name="get_time", parameters={"type": "object", "properties": {}})
WRITE = OfferedTool(
    name="write_file",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "lines": {"type": "array"}},
    },
)
TOOLS = (WEATHER, TIME, WRITE)


class Read(msgspec.Struct, frozen=True):
    """Result of parsing a response.

    Attributes:
        content: Joined content.
        reasoning: Joined reasoning.
        calls: Name and arguments of each complete call.
        begun: Names of all calls, complete or not.
        ids: Ids of all calls.
    """

    content: str
    reasoning: str
    calls: list[tuple[str, object]]
    begun: list[str]
    ids: list[str | None]


def read_pieces(
    pieces: Sequence[str],
    tool_family: str | None,
    reasoning_family: str | None = None,
    *,
    tools: Sequence[OfferedTool] = TOOLS,
    begins_inside: bool | None = None,
    is_lenient: bool = False,
) -> Read:
    parser = make_response_parser(
        tool_family, reasoning_family, tools=tools, begins_inside=begins_inside, is_lenient=is_lenient
    )
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    begun = [part for part in parts if isinstance(part, ToolCallBegin)]
    assert [part.index for part in begun] == list(range(len(begun)))
    open_index: int | None = None
    for part in parts:  # The arguments and the end of a call follow its beginning, and precede the next call.
        if isinstance(part, ToolCallBegin):
            open_index = part.index
        elif isinstance(part, ToolCallArguments | ToolCallEnd):
            assert part.index == open_index
    joined = JoinedResponse(parts)
    calls = [(call.name, json.loads(call.arguments)) for call in joined.calls]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    return Read(joined.content, joined.reasoning, calls, [part.name for part in begun], [part.id for part in begun])


@pytest.fixture(scope="session")
def read() -> Callable[..., Read]:
    """Return a function that parses a text as a whole and in pieces of 1, 2 and 7 characters.

    The results must be equal.
    """

    def read_text(text: str, tool_family: str | None, reasoning_family: str | None = None, **options: object) -> Read:
        whole = read_pieces([text], tool_family, reasoning_family, **options)  # type: ignore[arg-type]
        for size in (1, 2, 7):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert read_pieces(pieces, tool_family, reasoning_family, **options) == whole  # type: ignore[arg-type]
        return whole

    return read_text


@pytest.fixture(scope="session")
def read_in_pieces() -> Callable[..., Read]:
    return read_pieces


@pytest.fixture(scope="session")
def tools() -> Sequence[OfferedTool]:
    return TOOLS
