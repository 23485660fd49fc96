"""Kimi K2: calls between special tokens. Each has an id with its name, such as functions.name:0, and JSON."""

from __future__ import annotations

import re
from typing import Final

from trioserve.text.response_parsers.call_format import CallFormat, arguments_of
from trioserve.text.response_parsers.call_reading import CallReading, read_arguments
from trioserve.text.response_parsers.part_sink import NAME_CHARACTERS_MAX
from trioserve.text.response_parsers.text_source import NotACall, Script

__all__ = ["CALL_MARKER", "K2_FORMAT", "KIMI_TOKENS", "SECTION_MARKER", "read_call", "read_section"]

SECTION_MARKER: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
CALL_MARKER: Final = "<|tool_call_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
KIMI_TOKENS: Final = (SECTION_MARKER, _SECTION_END, CALL_MARKER, _CALL_END, _ARGUMENTS)
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
_NOISE_CHARACTERS_MAX: Final = 1024  # unexpected text between the tokens of a section


def read_section(reading: CallReading) -> Script[None]:
    """Read calls after the token that opens all calls.

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
    """Read one call after the token that opens it, including the token that closes it.

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
    if (yield from source.skip_space()) and not (yield from source.take_whole((_CALL_END,))):
        raise NotACall


# The model counts the calls of a conversation, but the grammar does not know how many there were. So it always writes
# 0.
K2_FORMAT = CallFormat(
    call=lambda tool: (f"{CALL_MARKER}functions.{tool.name}:0{_ARGUMENTS}", arguments_of(tool), _CALL_END),
    opening=SECTION_MARKER,
    closing=_SECTION_END,
    trigger=SECTION_MARKER,
)
