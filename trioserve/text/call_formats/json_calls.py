"""Families that write a call as one JSON object, between tags or behind a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.response_parsers.call_forms import CallForm, Piece, arguments_of, json_call
from trioserve.text.response_parsers.call_reading import CallReader, CallReading, read_calls
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.text_source import NotACall, Script

__all__ = ["COHERE_FORM", "HERMES_FORM", "LLAMA3_FORM", "json_form", "read_bare_calls", "read_nothing", "tagged_calls"]

_STRAY = re.compile(r"[\s}\]]+")  # models close one more than they have opened
_STRAY_CHARACTERS_MAX: Final = 256
HERMES_FORM = CallForm(
    call=json_call(before="<tool_call>\n", after="\n</tool_call>"), separator="\n", trigger="<tool_call>"
)
LLAMA3_FORM = CallForm(call=json_call(arguments_key="parameters"), separator="; ")


def tagged_calls(*closing: str, is_bare: bool = False) -> CallReader:
    """Behind an opening tag: one or more calls, and the first of the closing tags that comes. At the end of the text
    the tag may be missing. is_bare: the tag alone does not make it a call, the name must be that of a tool."""

    def read(reading: CallReading) -> Script[None]:
        yield from read_calls(reading, is_bare=is_bare)
        yield from reading.source.take_while(_STRAY, _STRAY_CHARACTERS_MAX)
        if (yield from reading.source.peek()) and not (yield from reading.source.take_whole(closing)):
            raise NotACall

    return read


def read_bare_calls(reading: CallReading) -> Script[None]:
    """Behind a marker without a closing one."""
    yield from read_calls(reading, is_bare=False)


def read_nothing(_reading: CallReading) -> Script[None]:
    """A mark around content, which says nothing."""
    yield from ()


def _cohere_call(tool: OfferedTool) -> Sequence[Piece]:
    head = f'{{"tool_call_id": "0", "tool_name": {json.dumps(tool.name)}, "parameters": '
    return (head, arguments_of(tool), "}")


COHERE_FORM = CallForm(
    call=_cohere_call,
    opening="<|START_ACTION|>[",
    closing="]<|END_ACTION|>",
    separator=", ",
)


def json_form(opening: str, closing: str, *, is_array: bool) -> CallForm:
    """An array of calls between the tags, or one call."""
    if is_array:
        return CallForm(call=json_call(), opening=opening + "[", closing="]" + closing, separator=", ", trigger=opening)
    return CallForm(call=json_call(before=opening, after=closing), separator="\n", trigger=opening)
