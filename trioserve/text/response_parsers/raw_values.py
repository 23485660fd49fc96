"""Reads arguments that a family writes as text between tags, and converts each to the JSON type in the tool's schema.

Strings are streamed. Other values are held back until they are complete.

A value is any text up to a closing tag. The value may also contain the spelling of that tag. The text after a tag shows
whether the tag closes the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from trioserve.text.response_parsers.call_format import CallReading
from trioserve.text.response_parsers.json_scanner import JsonScanner, ScanState
from trioserve.text.response_parsers.offered_tools import ANY_TYPE, argument_types
from trioserve.text.response_parsers.python_literal import json_of_python
from trioserve.text.response_parsers.scripts import ARGUMENT_CHARACTERS_MAX, NotACall, Script, TextEnded, TextSource

__all__ = ["Closing", "read_raw_value", "RawArguments", "json_of_raw"]

_SPACE = re.compile(r"\s+")


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """Condition under which a tag closes a value.

    Attributes:
        tag: The tag.
        followed_by: Texts, one of which must follow the tag after optional white space. Empty if any text may follow.
        at_line: True if the tag counts only at the beginning of a line.
        is_read: True to read the tag together with the value. False to leave the tag in the source.
        ends_text: True if the response may also end after the tag.
    """

    tag: str
    followed_by: Sequence[str] = ()
    at_line: bool = False
    is_read: bool = True
    ends_text: bool = False


def read_raw_value(
    source: TextSource, closings: Sequence[Closing], use: Callable[[str], None], *, trims_lines: bool
) -> Script[Closing]:
    """Read a value and the tag that closes it.

    Args:
        source: The text, after the tag that opens the value.
        closings: Conditions under which tags close the value.
        use: Receives the value piece by piece.
        trims_lines: True if one line break at each end of the value belongs to the tags.

    Returns:
        The condition that closed the value.

    Raises:
        TextEnded: The text ends before the value does.
    """
    tags = sorted({closing.tag for closing in closings}, key=len, reverse=True)
    plain = re.compile("[^\\n" + re.escape("".join(sorted({tag[0] for tag in tags}))) + "]+")
    line_break = ""  # Line break that is held back, since it may belong to the closing tag, or "".
    at_line = True
    if trims_lines and (yield from source.need()) == "\n":
        source.at += 1
    while True:
        character = yield from source.need()
        if match := plain.match(source.text, source.at):
            source.at = match.end()
            use(line_break + match.group())
            line_break, at_line = "", False
            continue
        if character == "\n":
            source.at += 1
            if not trims_lines:
                use("\n")
            elif line_break:
                use(line_break)
            line_break, at_line = ("\n" if trims_lines else ""), True
            continue
        tag = yield from source.find(tags)
        candidates = [closing for closing in closings if closing.tag == tag and (at_line or not closing.at_line)]
        if not candidates:
            text = tag or character
            source.at += len(text)
        else:
            closing, text = yield from _closing_or_text(source, candidates)
            if closing is not None:
                return closing
        use(line_break + text)
        line_break, at_line = "", False


def _closing_or_text(source: TextSource, candidates: Sequence[Closing]) -> Script[tuple[Closing | None, str]]:
    """Decide whether a tag closes the value.

    Returns:
        If a tag closes the value, its condition and "". Otherwise None and the text that was read, which belongs to the
        value.
    """
    first = candidates[0]
    if not first.is_read and not first.followed_by:
        return first, ""
    read = [first.tag]
    source.at += len(first.tag)
    if not first.followed_by:
        return first, ""
    while (yield from source.peek()) and (match := _SPACE.match(source.text, source.at)):
        read.append(match.group())
        source.at = match.end()
    if source.at == len(source.text) and source.over:
        ending = next((closing for closing in candidates if closing.ends_text), None)
        if ending is None:
            raise TextEnded
        return ending, ""
    for closing in candidates:
        if (yield from source.find(sorted(closing.followed_by, key=len, reverse=True))):
            if not closing.is_read:
                source.unread("".join(read))
            return closing, ""
    return None, "".join(read)


_TYPE_OF_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_TEXT = frozenset(("string",))
_TEXT_OR_NULL = frozenset(("string", "null"))
_NULL = "null"
_NULL_CHARACTERS_MAX: Final = 16  # Longest text of the value null with surrounding white space.
_WHOLE_NUMBER = re.compile(r"([+-]?)([0-9]+)")


class RawArguments:
    """Converts the arguments of the current call to JSON.

    Args:
        reading: State of the script that reads the call.
        name: Name of the function.
        unknown_is_text: True if an argument without a schema is a string. If False, the text of such an argument
            determines its type.
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
            is_text: True if the response marks the value as a string, False if it marks the value as JSON. None if the
                family's format has no such mark.

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
    """Convert a whole value to JSON. A value that has none of the allowed types becomes a string.

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
        return "string" not in types  # A string is written without JSON quotes, so such quotes belong to the string.
    if kind == "number":
        is_whole = re.fullmatch(r"-?[0-9]+(\.0*)?", value) is not None
        return "number" in types or ("integer" in types and is_whole)
    return kind in types
