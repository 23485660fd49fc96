"""Llama 3.2 and 4, Olmo 3: Python calls, as a list [get_weather(city="Paris"), get_time()] or one call per line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from trioserve.text.response_parsers.call_format import (
    AnyOf,
    CallFormat,
    CallReader,
    CallReading,
    JsonOf,
    Maybe,
    Piece,
    read_json,
    read_opened_array,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool, argument_schemas, argument_types
from trioserve.text.response_parsers.python_literal import PythonLiteral
from trioserve.text.response_parsers.scripts import NAME_CHARACTERS_MAX, NotACall, Script
from trioserve.text.response_parts import WholeCall

__all__ = [
    "PYTHONIC_FORMAT",
    "PYTHON_START",
    "PYTHON_END",
    "PYTHON_TOKENS",
    "lines_format",
    "list_format",
    "python_lines",
    "read_python_list",
    "tagged_list",
]

PYTHON_START: Final = "<|python_start|>"
PYTHON_END: Final = "<|python_end|>"
PYTHON_TOKENS: Final = (PYTHON_START, PYTHON_END)
_NAME = re.compile(r"[\w.\-]+")
_IDENTIFIER = re.compile(r"\w+")


def read_python_list(reading: CallReading) -> Script[None]:
    """Read a list of calls after its opening bracket. The calls are Python calls of offered tools, or JSON.

    A list in Python is one expression, so its calls are complete only when the whole list is complete.

    Args:
        reading: Text, offered tools and output of the response parser.
    """
    source = reading.source
    if (yield from source.need_after_space()) == "{":
        yield from read_opened_array(reading, is_bare=True)
        return
    while True:
        yield from _read_call(reading)
        if (yield from source.need_after_space()) == ",":
            source.at += 1
            if (yield from source.need_after_space()) != "]":
                continue
        yield from source.expect("]")
        reading.end_closed_calls()
        return


def tagged_list(closing: str) -> CallReader:
    """Return a parser generator for a list of calls between two tags. The opening tag was already read.

    Args:
        closing: The closing tag.
    """

    def read(reading: CallReading) -> Script[None]:
        source = reading.source
        yield from source.need_after_space()
        yield from source.expect("[")
        yield from read_python_list(reading)
        if (yield from source.skip_space()) and not (yield from source.take_whole((closing,))):
            raise NotACall

    return read


def python_lines(closing_tag: str) -> CallReader:
    """Return a parser generator for one call per line between two tags. The opening tag was already read."""

    def read(reading: CallReading) -> Script[None]:
        source = reading.source
        while (yield from source.need_after_space()):
            if (yield from source.take_whole((closing_tag,))):
                return
            yield from _read_call(reading, needs_offer=False)
            reading.end_closed_calls()
            if not (yield from source.skip_space()):
                return

    return read


def _read_call(reading: CallReading, *, needs_offer: bool = True) -> Script[None]:
    """Read name(argument=value, ...). The call is closed at once, but completed only together with its list."""
    source, sink = reading.source, reading.sink
    yield from source.need_after_space()
    name = yield from source.take_while(_NAME, NAME_CHARACTERS_MAX)
    yield from source.expect("(")
    if needs_offer and name not in reading.tools:
        raise NotACall
    sink.begin_call(name)
    keys: set[str] = set()
    while (yield from source.need_after_space()) != ")":
        key = yield from source.take_while(_IDENTIFIER, NAME_CHARACTERS_MAX)
        yield from source.need_after_space()
        yield from source.expect("=")
        if not key or key in keys:
            raise NotACall
        sink.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        yield from read_json(source, PythonLiteral(), sink.arguments)
        if (yield from source.need_after_space()) == ",":
            source.at += 1
        elif source.text[source.at] != ")":
            raise NotACall
    source.at += 1
    sink.arguments("}" if keys else "{}")
    sink.close_call()


def _call_pieces(tool: OfferedTool) -> Sequence[Piece]:
    root = tool.parameters or {}
    required = list(root.get("required") or ())
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    schemas = argument_schemas(tool)
    names = [name for name in schemas if _IDENTIFIER.fullmatch(name)]
    # Required arguments come first. So a comma precedes every further required argument and every optional argument.
    first = [name for name in names if name in required]
    pieces: list[Piece] = [f"{tool.name}("]
    for name in (*first, *(name for name in names if name not in first)):
        is_flag = argument_types(tool, name) == frozenset(("boolean",))
        value_pieces = AnyOf((("True",), ("False",))) if is_flag else JsonOf({**schemas[name], **shared}, tool.strict)
        value: list[Piece] = [f"{name}=", value_pieces]
        if name in first:
            pieces += [", ", *value] if len(pieces) > 1 else value
        else:
            pieces.append(Maybe([", ", *value] if first else [*value, ", "]))
    return (*pieces, ")")


def _written(call: WholeCall) -> str:
    arguments = json.loads(call.arguments)
    return f"{call.name}({', '.join(f'{name}={_python(value)}' for name, value in arguments.items())})"


def _python(value: object) -> str:
    """Return a value as a Python literal. Strings are quoted as in JSON."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {_python(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def list_format(opening: str, closing: str) -> CallFormat:
    return CallFormat(
        call=_call_pieces, write=_written, opening=opening + "[", closing="]" + closing, separator=", ", trigger=opening
    )


PYTHONIC_FORMAT = list_format("", "")


def lines_format(opening: str, closing: str) -> CallFormat:
    # The line break after a call is part of the call, since a grammar cannot distinguish it from the line break before
    # a closing tag.
    return CallFormat(
        call=lambda tool: (*_call_pieces(tool), "\n"),
        write=lambda call: _written(call) + "\n",
        opening=opening + "\n",
        closing=closing,
        trigger=opening,
    )
