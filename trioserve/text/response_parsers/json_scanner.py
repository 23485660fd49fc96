"""Scans one JSON value that arrives in pieces, to find its end and errors. Scanning needs no recursion.

The scanner tolerates one common mistake of models: a raw line break or another control character in a string. The
scanner replaces the character by its escape.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Final

__all__ = ["DEPTH_MAX", "At", "JsonScanner", "JsonStringDecoder", "ScanState", "ValueScanner"]

DEPTH_MAX: Final = 128  # Maximum number of nested objects and arrays. Python's json module fails at about 1,000.

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_NUMBER_RUN = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = frozenset("0123456789abcdefABCDEF")


class ScanState(enum.Enum):
    MORE = "more"  # The value is not complete yet.
    DONE = "done"
    BROKEN = "broken"  # The text is not valid JSON.


class At(enum.Enum):
    """Position of a scanner within a value."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # after [
    KEY_OR_END = enum.auto()  # after {
    KEY = enum.auto()  # The scanner is after a comma in an object.
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    BARE = enum.auto()  # The scanner is in a number or a name of a Python literal.
    OVER = enum.auto()
    NOWHERE = enum.auto()  # The text is not valid JSON.


class ValueScanner:
    """Base class with the state that all scanners of values have."""

    __slots__ = ("_at", "_objects", "_out")

    def __init__(self) -> None:
        self._at = At.VALUE
        self._objects = bytearray()  # One byte per open value, the outermost first: 1 is an object, 0 is an array.
        self._out: list[str] = []

    @property
    def state(self) -> ScanState:
        if self._at is At.OVER:
            return ScanState.DONE
        return ScanState.BROKEN if self._at is At.NOWHERE else ScanState.MORE

    def take(self) -> str:
        """Return the JSON text that was scanned since the last call of this method."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def _end_value(self) -> None:
        self._at = At.COMMA_OR_END if self._objects else At.OVER


class JsonScanner(ValueScanner):
    """Scans one JSON value. A number at the top level is complete at the next character, or when `end` is called.

    Args:
        only: Required first character of the value. Empty to accept any value.
    """

    __slots__ = ("_hex_left", "_is_key", "_literal", "_number", "_only")

    def __init__(self, only: str = "") -> None:
        super().__init__()
        self._only = only
        self._is_key = False
        self._hex_left = 0
        self._literal = ""
        self._number: list[str] = []

    def end(self) -> None:
        """End the text. A number at the top level is complete now."""
        if self._at is At.NUMBER and not self._objects:
            self._end_number()

    def scan(self, text: str, at: int) -> int:
        """Scan a piece until the state is DONE or BROKEN.

        Args:
            text: The piece.
            at: Index of the first character to scan.

        Returns:
            The index where scanning stopped: at the end of the piece, after the value, or at a character that is not
            JSON.
        """
        while at < len(text) and self._at is not At.OVER and self._at is not At.NOWHERE:
            if self._at is At.STRING:
                at = self._string(text, at)
            elif self._at is At.NUMBER:
                at = self._in_number(text, at)
            elif self._at in (At.ESCAPE, At.HEX, At.LITERAL):
                at += self._character(text[at])
            elif match := _SPACE.match(text, at):
                self._out.append(match.group())
                at = match.end()
            else:
                at += self._token(text[at])
        return at

    def _string(self, text: str, at: int) -> int:
        if match := _PLAIN.match(text, at):
            self._out.append(match.group())
            return match.end()
        character = text[at]
        if character < " ":
            self._out.append(json.dumps(character)[1:-1])
            return at + 1
        self._out.append(character)
        if character == "\\":
            self._at = At.ESCAPE
        elif self._is_key:
            self._at = At.COLON
        else:
            self._end_value()
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        if match := _NUMBER_RUN.match(text, at):
            self._number.append(match.group())
            self._out.append(match.group())
            return match.end()
        self._end_number()
        return at

    def _end_number(self) -> None:
        is_number = _NUMBER.fullmatch("".join(self._number))
        self._number.clear()
        if is_number:
            self._end_value()
        else:
            self._at = At.NOWHERE

    def _character(self, character: str) -> bool:
        """Scan one character of an escape or a literal. Return False if the character is not allowed there."""
        if self._at is At.ESCAPE and (character in _ESCAPES or character == "u"):
            self._at = At.HEX if character == "u" else At.STRING
            self._hex_left = 4
        elif self._at is At.HEX and character in _HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._at = At.STRING
        elif self._at is At.LITERAL and character == self._literal[0]:
            self._literal = self._literal[1:]
            if not self._literal:
                self._end_value()
        else:
            self._at = At.NOWHERE
            return False
        self._out.append(character)
        return True

    def _token(self, character: str) -> bool:
        at, self._at = self._at, At.NOWHERE
        is_value = at in (At.VALUE, At.VALUE_OR_END)
        if is_value and self._only and not self._objects and character != self._only:
            return False
        if is_value and character in "{[":
            if len(self._objects) < DEPTH_MAX:
                self._objects.append(character == "{")
                self._at = At.KEY_OR_END if character == "{" else At.VALUE_OR_END
        elif character == '"' and (is_value or at in (At.KEY, At.KEY_OR_END)):
            self._is_key = not is_value
            self._at = At.STRING
        elif is_value and character in "-0123456789":
            self._number.append(character)
            self._at = At.NUMBER
        elif is_value and character in _LITERALS:
            self._literal = _LITERALS[character][1:]
            self._at = At.LITERAL
        elif character == ":" and at is At.COLON:
            self._at = At.VALUE
        elif character == "," and at is At.COMMA_OR_END:
            self._at = At.KEY if self._objects[-1] else At.VALUE
        elif self._objects and (
            (character == "}" and self._objects[-1] and at in (At.KEY_OR_END, At.COMMA_OR_END))
            or (character == "]" and not self._objects[-1] and at in (At.VALUE_OR_END, At.COMMA_OR_END))
        ):
            self._objects.pop()
            self._end_value()
        if self.state is ScanState.BROKEN:
            return False
        self._out.append(character)
        return True


class JsonStringDecoder:
    """Decodes a JSON string that arrives in pieces, from its first character to its closing quote."""

    __slots__ = ("_escape", "_high", "_out", "state")

    def __init__(self) -> None:
        self.state = ScanState.MORE
        self._escape = ""  # Characters of the current escape so far.
        self._high = ""  # First half of a surrogate pair, or "".
        self._out: list[str] = []

    def take(self) -> str:
        """Return the text that was decoded since the last call of this method."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def scan(self, text: str, at: int) -> int:
        """Scan a piece until the state is DONE or BROKEN.

        Args:
            text: The piece.
            at: Index of the first character to scan.

        Returns:
            The index where scanning stopped: at the end of the piece, after the closing quote, or at a character that
            is not JSON.
        """
        while at < len(text) and self.state is ScanState.MORE:
            if self._escape:
                self._in_escape(text[at])
                at += 1
            elif match := _PLAIN.match(text, at):
                self._put(match.group())
                at = match.end()
            else:
                if text[at] == '"':
                    self._put("")
                    self.state = ScanState.DONE
                elif text[at] == "\\":
                    self._escape = "\\"
                else:
                    self._put(text[at])
                at += 1
        return at

    def _in_escape(self, character: str) -> None:
        self._escape += character
        if len(self._escape) == 2 and character in _ESCAPES:
            self._put(_ESCAPES[character])
        elif self._escape != "\\u" and not (self._escape.startswith("\\u") and character in _HEX):
            self.state = ScanState.BROKEN
            return
        elif len(self._escape) < 6:
            return
        else:
            self._put_unit(int(self._escape[2:], 16))
        self._escape = ""

    def _put_unit(self, unit: int) -> None:
        if self._high and 0xDC00 <= unit < 0xE000:
            high, self._high = ord(self._high), ""
            self._out.append(chr(0x10000 + ((high - 0xD800) << 10) + unit - 0xDC00))
        elif 0xD800 <= unit < 0xDC00:
            self._put("")
            self._high = chr(unit)
        else:
            self._put("\ufffd" if 0xDC00 <= unit < 0xE000 else chr(unit))

    def _put(self, text: str) -> None:
        if self._high:
            self._out.append("\ufffd")  # Half of a surrogate pair is not a character.
            self._high = ""
        self._out.append(text)
