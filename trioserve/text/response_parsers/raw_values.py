"""Arguments that a family writes as text between tags. Each becomes JSON of the type that the tool's schema names.

Strings are streamed. Other values are held back until they are complete.
"""

from __future__ import annotations

import json
import re
from typing import Final

from trioserve.text.response_parsers.call_reading import CallReading
from trioserve.text.response_parsers.json_scanner import JsonScanner, ScanState
from trioserve.text.response_parsers.part_sink import ARGUMENT_CHARACTERS_MAX
from trioserve.text.response_parsers.python_literal import json_of_python
from trioserve.text.response_parsers.schema_types import ANY_TYPE, argument_types
from trioserve.text.response_parsers.text_source import NotACall

__all__ = ["RawArguments", "json_of_raw"]

_TYPE_OF_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_TEXT = frozenset(("string",))
_TEXT_OR_NULL = frozenset(("string", "null"))
_NULL = "null"
_NULL_CHARACTERS_MAX: Final = 16  # longest "null" with white space around it
_WHOLE_NUMBER = re.compile(r"([+-]?)([0-9]+)")


class RawArguments:
    """Arguments of the current call.

    Args:
        reading: State of the script that reads the call.
        name: Name of the function.
        unknown_is_text: True if an argument without a schema is a string. Otherwise its text determines the type.
    """

    def __init__(self, reading: CallReading, name: str, *, unknown_is_text: bool) -> None:
        self._sink = reading.sink
        self._tool = reading.tools.get(name)
        self._unknown = _TEXT if unknown_is_text else ANY_TYPE
        self._keys: set[str] = set()
        self._types: frozenset[str] = _TEXT
        self._held: list[str] | None = None
        self._held_characters = 0

    def key(self, name: str, *, is_text: bool | None = None) -> None:
        """Begin an argument.

        Args:
            name: Name of the argument.
            is_text: True if the family's format marks the value as a string, False if as JSON. None if the format has
                no such mark.

        Raises:
            NotACall: The call already has this argument.
        """
        if name in self._keys:
            raise NotACall
        self._sink.arguments(f"{', ' if self._keys else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._keys.add(name)
        known = argument_types(self._tool, name)
        self._types = self._unknown if known is None else known
        if is_text is not None:
            self._types = _TEXT if is_text else ANY_TYPE
        self._held = None if self._types == _TEXT else []
        self._held_characters = 0
        if self._held is None:
            self._sink.arguments('"')

    def text(self, text: str) -> None:
        """Add a piece of the value.

        Args:
            text: The piece.

        Raises:
            NotACall: The value is too long.
        """
        if self._held is None:
            self._sink.arguments(_escaped(text))
            return
        self._held.append(text)
        self._held_characters += len(text)
        if self._held_characters > ARGUMENT_CHARACTERS_MAX:
            raise NotACall
        if self._types == _TEXT_OR_NULL:
            so_far = "".join(self._held)
            if len(so_far) > _NULL_CHARACTERS_MAX or not so_far.strip().startswith(_NULL[: len(so_far.strip())]):
                self._held = None
                self._sink.arguments('"' + _escaped(so_far))

    def end_value(self) -> None:
        if self._held is None:
            self._sink.arguments('"')
        else:
            self._sink.arguments(json_of_raw("".join(self._held), self._types))
            self._held = None

    def end(self) -> None:
        self._sink.arguments("}" if self._keys else "{}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of_raw(text: str, types: frozenset[str]) -> str:
    """Convert a whole value to JSON. If it cannot be read as one of the types, it becomes a string.

    Args:
        text: The value.
        types: Names of JSON types, or ANY_TYPE.
    """
    if "integer" in types and "string" not in types and (whole := _WHOLE_NUMBER.fullmatch(text.strip())):
        return f"{whole[1].strip('+')}{whole[2].lstrip('0') or '0'}"
    found = _read_as_json(text.strip())
    if found is not None and _fits(found, types):
        return found
    return json.dumps(text, ensure_ascii=False)


def _read_as_json(text: str) -> str | None:
    scanner = JsonScanner()
    rest = text[scanner.scan(text, 0) :]
    scanner.end()
    if scanner.state is ScanState.DONE and not rest:
        return scanner.take().strip()
    return json_of_python(text)


def _fits(value: str, types: frozenset[str]) -> bool:
    kind = _TYPE_OF_FIRST.get(value[0], "number")
    if types == ANY_TYPE:
        return True
    if kind == "string":
        return "string" not in types  # a string is written without JSON quotes, so these quotes are part of it
    if kind == "number":
        is_whole = re.fullmatch(r"-?[0-9]+(\.0*)?", value) is not None
        return "number" in types or ("integer" in types and is_whole)
    return kind in types
