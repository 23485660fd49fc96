"""Qwen3-Coder: <function=name> with <parameter=name> and plain text in it, within <tool_call>.

Seed-OSS writes the same tags within <seed:tool_call>. Models sometimes omit the surrounding tag, or the closing tag of
a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReader,
    CallReading,
    Piece,
    raw_argument_pieces,
    raw_text,
    read_calls,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.raw_values import Closing, RawArguments, read_raw_value
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script
from trioserve.text.response_parts import WholeCall

__all__ = ["FUNCTION_MARKER", "function_calls", "qwen_xml_format", "read_bare_function"]

FUNCTION_MARKER: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


def function_calls(closing_tag: str) -> CallReader:
    """Return the script that reads calls. The tag around the calls was already read.

    Args:
        closing_tag: The tag that closes the calls.
    """
    closings = _closings(closing_tag)

    def read(reading: CallReading) -> Script[None]:
        source = reading.source
        character = yield from source.need_after_space()
        if character == "{":
            yield from read_calls(reading, is_bare=False)
        else:
            yield from source.expect(FUNCTION_MARKER)
            yield from _read_function(reading, closings)
            while (yield from source.skip_space()) and (yield from source.take_whole((FUNCTION_MARKER,))):
                yield from _read_function(reading, closings)
        if (yield from source.skip_space()) and not (yield from source.take_whole((closing_tag,))):
            raise NotACall

    return read


def read_bare_function(closing_tag: str) -> CallReader:
    """Return the script that reads a call after <function= if the tag around the call is missing.

    The call must name an offered tool.

    Args:
        closing_tag: The tag that may close the call.
    """
    closings = _closings(closing_tag)

    def read(reading: CallReading) -> Script[None]:
        source = reading.source
        yield from _read_function(reading, closings, is_bare=True)
        if (yield from source.skip_space()) and not (yield from source.take_whole((closing_tag,))):
            raise NotACall

    return read


def _closings(closing_tag: str) -> Sequence[Closing]:
    after = (_PARAMETER, _FUNCTION_END, closing_tag)
    return (
        Closing(tag=_PARAMETER_END, followed_by=after),
        Closing(tag=_PARAMETER, at_line=True, is_read=False),
        Closing(tag=_FUNCTION_END, followed_by=(closing_tag,)),
        Closing(tag=_FUNCTION_END, at_line=True, followed_by=(closing_tag, FUNCTION_MARKER), ends_text=True),
    )


def _read_function(reading: CallReading, closings: Sequence[Closing], *, is_bare: bool = False) -> Script[None]:
    """Read a call and its closing tag. The text <function= was already read."""
    source = reading.source
    name, _ = yield from source.take_until((">",), NAME_CHARACTERS_MAX)
    name = name.strip().strip("\"'")
    if is_bare and name not in reading.tools:
        raise NotACall
    reading.sink.begin_call(name)
    arguments = RawArguments(reading, name, unknown_is_text=True)
    while True:
        yield from source.need_after_space()
        if (yield from source.take_whole((_FUNCTION_END,))):
            break
        if not (yield from source.take_whole((_PARAMETER,))):
            raise NotACall
        key, _ = yield from source.take_until((">",), NAME_CHARACTERS_MAX)
        arguments.key(key.strip().strip("\"'"))
        closing = yield from read_raw_value(source, closings, arguments.text, trims_lines=True)
        arguments.end_value()
        if closing.tag == _FUNCTION_END:
            break
    arguments.end()
    reading.end_call()


def qwen_xml_format(opening_tag: str, closing_tag: str) -> CallFormat:
    end = f"{_FUNCTION_END}\n{closing_tag}"

    def call(tool: OfferedTool) -> Sequence[Piece]:
        head = f"{opening_tag}\n{FUNCTION_MARKER}{tool.name}>\n"
        pieces = raw_argument_pieces(
            tool, lambda name, _: f"{_PARAMETER}{name}>\n", f"\n{_PARAMETER_END}\n", says_text=False
        )
        return (head, *pieces, end)

    def write(call: WholeCall) -> str:
        values = "".join(
            f"{_PARAMETER}{name}>\n{raw_text(value)}\n{_PARAMETER_END}\n"
            for name, value in json.loads(call.arguments).items()
        )
        return f"{opening_tag}\n{FUNCTION_MARKER}{call.name}>\n{values}{end}"

    return CallFormat(call=call, write=write, separator="\n", trigger=opening_tag)
