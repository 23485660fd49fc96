"""Kimi K3: channels, calls and arguments between <|open|>name<|sep|> and <|close|>name<|sep|>."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.call_formats.json_calls import read_nothing
from trioserve.text.joined_response import WholeCall
from trioserve.text.response_parsers.call_format import CallFormat, Piece, raw_argument_pieces, raw_text
from trioserve.text.response_parsers.call_reading import CallReader, CallReading
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.part_sink import NAME_CHARACTERS_MAX
from trioserve.text.response_parsers.raw_reading import Closing, read_raw_value
from trioserve.text.response_parsers.raw_values import RawArguments
from trioserve.text.response_parsers.reasoning_script import ReasoningTags
from trioserve.text.response_parsers.schema_types import argument_types
from trioserve.text.response_parsers.text_source import NotACall, Script

__all__ = ["K3_FORMAT", "K3_READERS", "K3_REASONING", "K3_TOKENS"]

K3_TOKENS: Final = ("<|open|>", "<|close|>", "<|sep|>")
_RESPONSE, _RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
_TOOLS, _TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL, _CALL_END = "<|open|>call", "<|close|>call<|sep|>"
_ARGUMENT, _ARGUMENT_END = "<|open|>argument", "<|close|>argument<|sep|>"
_SEPARATOR = "<|sep|>"
_ATTRIBUTE = re.compile(r'\b(\w+)="([^"]*)"')
_CLOSINGS = (Closing(tag=_ARGUMENT_END, followed_by=(_ARGUMENT, _CALL_END)),)

# The tag that begins the part after reasoning also ends reasoning. So a prompt that has begun that part has no open
# reasoning.
K3_REASONING = ReasoningTags(
    opening=("<|open|>think<|sep|>",), closing=("<|close|>think<|sep|>", _RESPONSE), interleaves=True
)


def _read_calls(reading: CallReading) -> Script[None]:
    """Read calls after the tag around them."""
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
    """Return the first type that the schema of an argument allows."""
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
