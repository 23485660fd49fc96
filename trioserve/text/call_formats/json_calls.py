"""Formats that write a call as one JSON object, between tags or after a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReader,
    CallReading,
    Piece,
    arguments_of,
    json_call,
    read_calls,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.scripts import NotACall, Script

__all__ = [
    "COHERE_FORMAT",
    "HERMES_FORMAT",
    "LLAMA3_FORMAT",
    "json_format",
    "read_bare_calls",
    "read_nothing",
    "tagged_calls",
]

_STRAY = re.compile(r"[\s}\]]+")  # Models often write one closing bracket too many after a call.
_STRAY_CHARACTERS_MAX: Final = 256
HERMES_FORMAT = CallFormat(
    call=json_call(before="<tool_call>\n", after="\n</tool_call>"), separator="\n", trigger="<tool_call>"
)
LLAMA3_FORMAT = CallFormat(call=json_call(arguments_key="parameters"), separator="; ")


def tagged_calls(*closing: str, is_bare: bool = False) -> CallReader:
    """Return the script that reads one or more calls after an opening tag, up to and including a closing tag.

    The closing tag may be missing at the end of the text.

    Args:
        *closing: The closing tags.
        is_bare: True if the opening tag may also appear in ordinary text. Then a call must name an offered tool.
    """

    def read(reading: CallReading) -> Script[None]:
        yield from read_calls(reading, is_bare=is_bare)
        yield from reading.source.take_while(_STRAY, _STRAY_CHARACTERS_MAX)
        if (yield from reading.source.peek()) and not (yield from reading.source.take_whole(closing)):
            raise NotACall

    return read


def read_bare_calls(reading: CallReading) -> Script[None]:
    """Read calls in a format that marks only the beginning of calls. The marker was already read.

    Args:
        reading: State of the script.
    """
    yield from read_calls(reading, is_bare=False)


def read_nothing(_reading: CallReading) -> Script[None]:
    """Read nothing. This is the script for marks around content, which are dropped.

    Args:
        _reading: State of the script.
    """
    yield from ()


def _cohere_call(tool: OfferedTool) -> Sequence[Piece]:
    head = f'{{"tool_call_id": "0", "tool_name": {json.dumps(tool.name)}, "parameters": '
    return (head, arguments_of(tool), "}")


COHERE_FORMAT = CallFormat(
    call=_cohere_call,
    opening="<|START_ACTION|>[",
    closing="]<|END_ACTION|>",
    separator=", ",
)


def json_format(opening: str, closing: str, *, is_array: bool) -> CallFormat:
    """Return the format for an array of calls between two tags, or for a single call between two tags.

    Args:
        opening: Text before the array or call.
        closing: Text after the array or call.
        is_array: True for an array.
    """
    if is_array:
        return CallFormat(
            call=json_call(), opening=opening + "[", closing="]" + closing, separator=", ", trigger=opening
        )
    return CallFormat(call=json_call(before=opening, after=closing), separator="\n", trigger=opening)
