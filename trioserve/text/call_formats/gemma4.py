"""Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>.

Keys of objects have no quotes. Strings are enclosed in the special token <|"|>.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Final

from trioserve.text.response_parsers.call_format import CallFormat, CallReading, json_call, read_calls
from trioserve.text.response_parsers.json_scanner import DEPTH_MAX
from trioserve.text.response_parsers.python_literal import json_of_python
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script

__all__ = ["CALL_MARKER", "GEMMA4_FORMAT", "GEMMA4_TOKENS", "read_gemma4_call"]

CALL_MARKER: Final = "<|tool_call>"
_CALL_END: Final = "<tool_call|>"
_QUOTE: Final = '<|"|>'
GEMMA4_TOKENS: Final = (CALL_MARKER, _CALL_END, _QUOTE)
_PREFIX: Final = "call:"
_NAME = re.compile(r"[\w.:/\-]+")
_KEY_OR_WORD = re.compile(r"[^<:,{}\[\]]+")
_TEXT = re.compile(r"[^<]+")
_WORD_CHARACTERS_MAX: Final = 4096


class _At(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY_OR_END = enum.auto()
    COMMA_OR_END = enum.auto()


def read_gemma4_call(reading: CallReading) -> Script[None]:
    """Read one call and its closing token. The opening token of the call was already read.

    Args:
        reading: State of the script.
    """
    source, sink = reading.source, reading.sink
    if (yield from source.need_after_space()) == "{":  # The grammar of a forced call writes JSON.
        yield from read_calls(reading, is_bare=False)
    else:
        yield from source.expect(_PREFIX)
        name = yield from source.take_while(_NAME, NAME_CHARACTERS_MAX)
        if (yield from source.need_after_space()) != "{":
            raise NotACall
        sink.begin_call(name)
        yield from _read_object(reading)
        reading.end_call()
    if (yield from source.skip_space()) and not (yield from source.take_whole((_CALL_END,))):
        raise NotACall


def _read_object(reading: CallReading) -> Script[None]:
    source, sink = reading.source, reading.sink
    objects = bytearray()  # One byte per open value, the outermost first: 1 is an object, 0 is an array.
    at = _At.VALUE
    while True:
        character = yield from source.need_after_space()
        if at in (_At.VALUE, _At.VALUE_OR_END) and character in "{[":
            if len(objects) >= DEPTH_MAX:
                raise NotACall
            source.at += 1
            objects.append(character == "{")
            sink.arguments(character)
            at = _At.KEY_OR_END if character == "{" else _At.VALUE_OR_END
        elif character in "}]" and objects[-1] == (character == "}") and at is not _At.VALUE:
            source.at += 1
            objects.pop()
            sink.arguments(character)
            if not objects:
                return
            at = _At.COMMA_OR_END
        elif character == "," and at is _At.COMMA_OR_END:
            source.at += 1
            sink.arguments(", ")
            at = _At.KEY_OR_END if objects[-1] else _At.VALUE
        elif at is _At.KEY_OR_END:
            yield from _read_key(reading)
            at = _At.VALUE
        elif at in (_At.VALUE, _At.VALUE_OR_END):
            yield from _read_plain_value(reading)
            at = _At.COMMA_OR_END
        else:
            raise NotACall


def _read_key(reading: CallReading) -> Script[None]:
    source = reading.source
    if (yield from source.take((_QUOTE,))):
        key, _ = yield from source.take_until((_QUOTE,), NAME_CHARACTERS_MAX)
    else:
        key = (yield from source.take_while(_KEY_OR_WORD, NAME_CHARACTERS_MAX)).strip().strip('"')
    yield from source.need_after_space()
    yield from source.expect(":")
    if not key:
        raise NotACall
    reading.sink.arguments(json.dumps(key, ensure_ascii=False) + ": ")


def _read_plain_value(reading: CallReading) -> Script[None]:
    """Read a string in quotes, a number, true, false or null. Any other word is read as a string."""
    source, sink = reading.source, reading.sink
    if not (yield from source.take((_QUOTE,))):
        word = (yield from source.take_while(_KEY_OR_WORD, _WORD_CHARACTERS_MAX)).strip()
        yield from source.need()
        if not word:
            raise NotACall
        sink.arguments(json_of_python(word) or json.dumps(word, ensure_ascii=False))
        return
    sink.arguments('"')
    while not (yield from source.take((_QUOTE,))):
        yield from source.need()
        match = _TEXT.match(source.text, source.at)
        text = match.group() if match else source.text[source.at]
        source.at += len(text)
        sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
    sink.arguments('"')


# A forced call is JSON between the family's markers, since a grammar made from a JSON schema cannot express objects
# with unquoted keys.
GEMMA4_FORMAT = CallFormat(call=json_call(before=CALL_MARKER, after=_CALL_END), separator="\n")
