"""Kimi: formats of calls.

Kimi K2 writes each call between special tokens: an id that contains the tool's name, such as functions.name:0, and JSON
arguments. Kimi K3 writes channels, calls and arguments between <|open|>name<|sep|> and <|close|>name<|sep|>.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.call_formats.json_calls import read_nothing
from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReader,
    CallReading,
    Piece,
    arguments_of,
    raw_argument_pieces,
    raw_text,
    read_arguments,
)
from trioserve.text.response_parsers.content_script import ReasoningTags
from trioserve.text.response_parsers.offered_tools import OfferedTool, argument_types
from trioserve.text.response_parsers.raw_values import Closing, RawArguments, read_raw_value
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script
from trioserve.text.response_parts import WholeCall

__all__ = [
    "K3_FORMAT",
    "K3_READERS",
    "K3_REASONING",
    "K3_TOKENS",
    "CALL_MARKER",
    "K2_FORMAT",
    "KIMI_TOKENS",
    "SECTION_MARKER",
    "read_call",
    "read_section",
]

K3_TOKENS: Final = ("<|open|>", "<|close|>", "<|sep|>")
_RESPONSE, _RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
_TOOLS, _TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL, _CALL_END = "<|open|>call", "<|close|>call<|sep|>"
_ARGUMENT, _ARGUMENT_END = "<|open|>argument", "<|close|>argument<|sep|>"
_SEPARATOR = "<|sep|>"
_ATTRIBUTE = re.compile(r'\b(\w+)="([^"]*)"')
_CLOSINGS = (Closing(tag=_ARGUMENT_END, followed_by=(_ARGUMENT, _CALL_END)),)

# The tag that opens the response channel also ends reasoning. So reasoning is not open in a prompt that contains this
# tag.
K3_REASONING = ReasoningTags(
    opening=("<|open|>think<|sep|>",), closing=("<|close|>think<|sep|>", _RESPONSE), interleaves=True
)


def _read_calls(reading: CallReading) -> Script[None]:
    """Read calls. The tag around all calls was already read."""
    source = reading.source
    while True:
        yield from source.need_after_space()
        if (yield from source.take_whole((_TOOLS_END,))):
            return
        if not (yield from source.take_whole((_CALL,))):
            raise NotACall
        yield from _read_call(reading)
        if not (yield from source.skip_space()):
            return


def _read_call(reading: CallReading) -> Script[None]:
    source = reading.source
    name = (yield from _attributes(reading)).get("tool", "")
    reading.sink.begin_call(name)
    arguments = RawArguments(reading, name, unknown_is_text=True)
    while True:
        yield from source.need_after_space()
        if (yield from source.take_whole((_CALL_END,))):
            break
        if not (yield from source.take_whole((_ARGUMENT,))):
            raise NotACall
        attributes = yield from _attributes(reading)
        if "key" not in attributes:
            raise NotACall
        kind = attributes.get("type")
        arguments.key(attributes["key"], is_text=None if kind is None else kind == "string")
        yield from read_raw_value(source, _CLOSINGS, arguments.text, trims_lines=False)
        arguments.end_value()
    arguments.end()
    reading.end_call()


def _attributes(reading: CallReading) -> Script[dict[str, str]]:
    text, _ = yield from reading.source.take_until((_SEPARATOR,), NAME_CHARACTERS_MAX)
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}


K3_READERS: dict[str, CallReader] = {
    _TOOLS: _read_calls,
    _RESPONSE: read_nothing,
    _RESPONSE_END: read_nothing,
    "<|close|>message<|sep|>": read_nothing,
}


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null"


def _type_in(tool: OfferedTool, name: str) -> str:
    """Return the first JSON type that the schema of an argument allows."""
    names = sorted(argument_types(tool, name) or ("object",))
    return "number" if names[0] == "integer" else names[0]


def _begin(name: str, kind: str) -> str:
    return f'{_ARGUMENT} key="{html.escape(name)}" type="{kind}"{_SEPARATOR}'


def _call_pieces(tool: OfferedTool) -> Sequence[Piece]:
    def begin(name: str, is_text: bool) -> str:
        return _begin(name, "string" if is_text else _type_in(tool, name))

    pieces = raw_argument_pieces(tool, begin, _ARGUMENT_END, says_text=True)
    return (f'{_CALL} tool="{html.escape(tool.name)}" index="1"{_SEPARATOR}', *pieces, _CALL_END)


def _written(call: WholeCall) -> str:
    values = "".join(
        _begin(name, _type_of(value)) + raw_text(value) + _ARGUMENT_END
        for name, value in json.loads(call.arguments).items()
    )
    return f'{_CALL} tool="{html.escape(call.name)}" index="1"{_SEPARATOR}{values}{_CALL_END}'


K3_FORMAT = CallFormat(call=_call_pieces, write=_written, opening=_TOOLS, closing=_TOOLS_END)


SECTION_MARKER: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
CALL_MARKER: Final = "<|tool_call_begin|>"
_CALL_MARKER_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
KIMI_TOKENS: Final = (SECTION_MARKER, _SECTION_END, CALL_MARKER, _CALL_MARKER_END, _ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_NOISE_CHARACTERS_MAX: Final = 1024  # Longest unexpected text that is skipped before a call.


def read_section(reading: CallReading) -> Script[None]:
    """Read all calls of a section. The token that opens the section was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    while (yield from source.peek()):
        _, marker = yield from source.take_until((CALL_MARKER, _SECTION_END), _NOISE_CHARACTERS_MAX)
        if marker == _SECTION_END:
            return
        yield from read_call(reading)
    yield from source.need()


def read_call(reading: CallReading) -> Script[None]:
    """Read one call and its closing token. Its opening token was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    call_id, _ = yield from source.take_until((_ARGUMENTS,), NAME_CHARACTERS_MAX)
    found = _ID.fullmatch(call_id.strip())
    if found is None or (yield from source.need_after_space()) != "{":
        raise NotACall
    reading.sink.begin_call(found["name"], call_id.strip())
    yield from read_arguments(reading)
    reading.end_call()
    if (yield from source.skip_space()) and not (yield from source.take_whole((_CALL_MARKER_END,))):
        raise NotACall


# The model numbers the calls of a conversation, but the grammar does not know the number of earlier calls. So the
# grammar always writes the number 0.
K2_FORMAT = CallFormat(
    call=lambda tool: (f"{CALL_MARKER}functions.{tool.name}:0{_ARGUMENTS}", arguments_of(tool), _CALL_MARKER_END),
    opening=SECTION_MARKER,
    closing=_SECTION_END,
    trigger=SECTION_MARKER,
)
