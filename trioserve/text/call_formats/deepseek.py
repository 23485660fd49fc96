"""DeepSeek V3, R1 and V3.1: calls between special tokens.

In V3 and R1, a call consists of its type, its name and fenced JSON. In V3.1, a call consists of its name and JSON.
"""

from __future__ import annotations

import re
from typing import Final

from trioserve.text.response_parsers.call_format import CallFormat, CallReading, arguments_of, read_arguments
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script

__all__ = ["CALLS_MARKER", "CALL_MARKER", "DEEPSEEK_TOKENS", "V31_FORMAT", "V3_FORMAT", "read_call", "read_section"]

CALLS_MARKER: Final = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END: Final = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_MARKER: Final = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END: Final = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR: Final = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK_TOKENS: Final = (CALLS_MARKER, _CALLS_END, CALL_MARKER, _CALL_END, _SEPARATOR)
_FENCE = "```"
_WORD = re.compile(r"\w+")


def read_section(reading: CallReading) -> Script[None]:
    """Read all calls of a response. The token that opens the section of calls was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    while True:
        yield from source.need_after_space()
        if (yield from source.take_whole((_CALLS_END,))):
            return
        if not (yield from source.take_whole((CALL_MARKER,))):
            raise NotACall
        yield from read_call(reading)
        if not (yield from source.skip_space()):
            return


def read_call(reading: CallReading) -> Script[None]:
    """Read one call and its closing token. Its opening token was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    name, _ = yield from source.take_until((_SEPARATOR,), NAME_CHARACTERS_MAX)
    is_fenced = (yield from source.need_after_space()) != "{"
    if is_fenced:
        name, _ = yield from source.take_until(("\n", _FENCE), NAME_CHARACTERS_MAX)
        if (yield from source.need_after_space()) != "{":
            yield from source.take_whole((_FENCE,))
            yield from source.take_while(_WORD, NAME_CHARACTERS_MAX)
        if (yield from source.need_after_space()) != "{":
            raise NotACall
    reading.sink.begin_call(name.strip())
    yield from read_arguments(reading)
    reading.end_call()
    yield from source.skip_space()
    if is_fenced and (yield from source.take_whole((_FENCE,))):
        yield from source.skip_space()
    if not (yield from source.take_whole((_CALL_END,))) and (yield from source.peek()):
        raise NotACall


V3_FORMAT = CallFormat(
    call=lambda tool: (
        f"{CALL_MARKER}function{_SEPARATOR}{tool.name}\n{_FENCE}json\n",
        arguments_of(tool),
        f"\n{_FENCE}{_CALL_END}",
    ),
    opening=CALLS_MARKER,
    closing=_CALLS_END,
    separator="\n",
    trigger=CALLS_MARKER,
)
V31_FORMAT = CallFormat(
    call=lambda tool: (f"{CALL_MARKER}{tool.name}{_SEPARATOR}", arguments_of(tool), _CALL_END),
    opening=CALLS_MARKER,
    closing=_CALLS_END,
    trigger=CALLS_MARKER,
)
