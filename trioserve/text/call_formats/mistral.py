"""Mistral: [TOOL_CALLS] and a JSON array of calls. Since version 11, [TOOL_CALLS]name[ARGS]{...} for each call.

Some versions write [CALL_ID] and an id after the name.
"""

from __future__ import annotations

import re

from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReading,
    arguments_of,
    json_call,
    read_arguments,
    read_calls,
)
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script

__all__ = [
    "ARGUMENTS_MARKER",
    "CALLS_MARKER",
    "CALL_ID_MARKER",
    "MISTRAL_ARRAY_FORMAT",
    "MISTRAL_FORMAT",
    "MISTRAL_TOKENS",
    "read_mistral_calls",
]

CALLS_MARKER = "[TOOL_CALLS]"
CALL_ID_MARKER = "[CALL_ID]"
ARGUMENTS_MARKER = "[ARGS]"
MISTRAL_TOKENS = (CALLS_MARKER, CALL_ID_MARKER, ARGUMENTS_MARKER)
MISTRAL_FORMAT = CallFormat(
    call=lambda tool: (f"{CALLS_MARKER}{tool.name}{ARGUMENTS_MARKER}", arguments_of(tool)), trigger=CALLS_MARKER
)
MISTRAL_ARRAY_FORMAT = CallFormat(
    call=json_call(), opening=f"{CALLS_MARKER} [", closing="]", separator=", ", trigger=CALLS_MARKER
)
_NAME = re.compile(r"[\w.:/\-]+")
_CALL_ID = re.compile(r"[\w\-]+")


def read_mistral_calls(reading: CallReading) -> Script[None]:
    """Read calls. The token [TOOL_CALLS] was already read.

    Args:
        reading: State of the script.
    """
    source = reading.source
    if (yield from source.need_after_space()) in "[{":
        yield from read_calls(reading, is_bare=False)
        return
    name = yield from source.take_while(_NAME, NAME_CHARACTERS_MAX)
    call_id = None
    if (yield from source.take_whole((CALL_ID_MARKER,))):
        call_id = yield from source.take_while(_CALL_ID, NAME_CHARACTERS_MAX)
    yield from source.take_whole((ARGUMENTS_MARKER,))
    if (yield from source.need_after_space()) != "{":
        raise NotACall
    reading.sink.begin_call(name, call_id)
    yield from read_arguments(reading)
    reading.end_call()
