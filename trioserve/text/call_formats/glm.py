"""GLM 4.5 and later: <tool_call>name, then <arg_key> and <arg_value> for each argument.

GLM 4.5 and 4.6 write line breaks between the tags. GLM 4.7 and later write none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.response_parsers.call_format import (
    CallFormat,
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

__all__ = ["CALL_TAG", "GLM_TOKENS", "glm_format", "read_glm_call"]

CALL_TAG: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
GLM_TOKENS: Final = (CALL_TAG, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END)
_NAME = re.compile(r"[\w.:/\-]+")
_CLOSINGS = (
    Closing(tag=_VALUE_END, followed_by=(_KEY, _CALL_END)),
    # This tag also closes a value whose own closing tag is missing.
    Closing(tag=_CALL_END, followed_by=(CALL_TAG,), ends_text=True),
)


def read_glm_call(reading: CallReading) -> Script[None]:
    """Read one call and its closing tag. The opening tag was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    if (yield from source.need_after_space()) in "{[":
        yield from read_calls(reading, is_bare=False)
        if (yield from source.skip_space()) and not (yield from source.take_whole((_CALL_END,))):
            raise NotACall
        return
    name = yield from source.take_while(_NAME, NAME_CHARACTERS_MAX)
    yield from source.need_after_space()
    if not (yield from source.find((_KEY, _CALL_END))) and not source.over:
        raise NotACall
    reading.sink.begin_call(name)
    arguments = RawArguments(reading, name, unknown_is_text=False)
    while True:
        yield from source.need_after_space()
        if (yield from source.take_whole((_CALL_END,))):
            break
        if not (yield from source.take_whole((_KEY,))):
            raise NotACall
        key, _ = yield from source.take_until((_KEY_END,), NAME_CHARACTERS_MAX)
        yield from source.need_after_space()
        yield from source.expect(_VALUE)
        arguments.key(key.strip())
        closing = yield from read_raw_value(source, _CLOSINGS, arguments.text, trims_lines=False)
        arguments.end_value()
        if closing.tag == _CALL_END:
            break
    arguments.end()
    reading.end_call()


def glm_format(line_break: str) -> CallFormat:
    """Return the format in which GLM writes calls.

    Args:
        line_break: Text between two tags.
    """

    def begin(name: str, _is_text: bool) -> str:
        return f"{_KEY}{name}{_KEY_END}{line_break}{_VALUE}"

    def call(tool: OfferedTool) -> Sequence[Piece]:
        pieces = raw_argument_pieces(tool, begin, _VALUE_END + line_break, says_text=False)
        return (f"{CALL_TAG}{tool.name}{line_break}", *pieces, _CALL_END)

    def write(call: WholeCall) -> str:
        values = "".join(
            begin(name, isinstance(value, str)) + raw_text(value) + _VALUE_END + line_break
            for name, value in json.loads(call.arguments).items()
        )
        return f"{CALL_TAG}{call.name}{line_break}{values}{_CALL_END}"

    return CallFormat(call=call, write=write, separator=line_break, trigger=CALL_TAG)
