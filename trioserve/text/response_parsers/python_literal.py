"""Converts a Python literal that arrives in pieces to JSON, without recursion.

Supported are lists, dicts with string keys, strings in any quotes, numbers, True, False and None, and also true, false
and null. Other names, calls and operators are refused, since nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from typing import Final

from trioserve.text.response_parsers.json_scanner import DEPTH_MAX, At, ScanState, ValueScanner

__all__ = ["PythonLiteral", "json_of_python"]

_SPACE = re.compile(r"\s+")
_BARE = re.compile(r"[-+.\w]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_NUMBER = re.compile(r"([+-]?)([0-9][0-9_]*)?(\.[0-9_]*)?([eE][+-]?[0-9]+)?")
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v",
            "a": "\a", "0": "\0", "\n": ""}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_BARE_CHARACTERS_MAX: Final = 4096  # Longest number or name that is scanned.


class PythonLiteral(ValueScanner):
    """Scans one Python literal.

    A number or name at the top level is complete at the next character, or when `end` is called.
    """

    __slots__ = (
        "_bare",
        "_escape",
        "_is_key",
        "_is_triple",
        "_needs_comma",
        "_quote",
        "_quotes",
    )

    def __init__(self) -> None:
        super().__init__()
        # A comma is passed on only before the next value, since Python allows a trailing comma and JSON does not.
        self._needs_comma = False
        self._is_key = False
        self._quote = ""
        self._quotes = 0  # Number of consecutive quotes so far at the beginning or the end of a string.
        self._is_triple: bool | None = None  # None until the number of opening quotes is known.
        self._escape = ""
        self._bare = ""

    def end(self) -> None:
        """End the text. A number, a name or an empty string at the top level is complete now."""
        if self._at is At.BARE:
            self._end_bare()
        elif self._at is At.STRING and self._is_triple is None and self._quotes == 2:
            self._end_string()

    def scan(self, text: str, at: int) -> int:
        """Scan a piece until the state is DONE or BROKEN.

        Args:
            text: The piece.
            at: Index of the first character to scan.

        Returns:
            The index where scanning stopped: at the end of the piece, after the value, or at a character that is no
            literal.
        """
        while at < len(text) and self._at is not At.OVER and self._at is not At.NOWHERE:
            if self._at is At.STRING:
                at = self._in_string(text, at)
            elif self._at is At.BARE:
                if match := _BARE.match(text, at):
                    at = match.end()
                    self._add_bare(match.group())
                else:
                    self._end_bare()
            elif match := _SPACE.match(text, at):
                at = match.end()
            else:
                at += self._token(text[at])
        return at

    # ---- strings

    def _in_string(self, text: str, at: int) -> int:
        character = text[at]
        if self._is_triple is None:
            if character == self._quote and self._quotes < 3:
                self._quotes += 1
                if self._quotes == 3:
                    self._is_triple, self._quotes = True, 0
                return at + 1
            if self._quotes == 2:
                self._end_string()  # The two quotes before this character were an empty string.
                return at
            self._is_triple, self._quotes = False, 0
        if self._escape:
            self._in_escape(character)
            return at + 1
        if character == self._quote:
            self._quotes += 1
            if self._quotes == (3 if self._is_triple else 1):
                self._end_string()
            return at + 1
        if self._quotes:
            self._put(self._quote * self._quotes)
            self._quotes = 0
        if match := _PLAIN[self._quote].match(text, at):
            self._put(match.group())
            return match.end()
        self._escape = "\\"
        return at + 1

    def _in_escape(self, character: str) -> None:
        self._escape += character
        kind = self._escape[1]
        if kind in _HEX_DIGITS and len(self._escape) > 2 and character not in "0123456789abcdefABCDEF":
            self._at = At.NOWHERE
        elif kind in _HEX_DIGITS and len(self._escape) < 2 + _HEX_DIGITS[kind]:
            return
        elif kind in _HEX_DIGITS:
            self._put_code_point(int(self._escape[2:], 16))
        else:
            self._put(_ESCAPES.get(kind, self._escape))
        self._escape = ""

    def _put_code_point(self, code_point: int) -> None:
        if code_point > 0x10FFFF:
            self._at = At.NOWHERE
        elif 0xD800 <= code_point < 0xE000:
            self._out.append(f"\\u{code_point:04x}")  # This is half of a surrogate pair. Its second half may follow.
        else:
            self._put(chr(code_point))

    def _put(self, text: str) -> None:
        self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_string(self) -> None:
        self._out.append('"')
        self._quotes, self._is_triple = 0, None
        if self._is_key:
            self._at = At.COLON
        else:
            self._end_value()

    # ---- everything else

    def _add_bare(self, text: str) -> None:
        self._bare += text
        if len(self._bare) > _BARE_CHARACTERS_MAX:
            self._at = At.NOWHERE

    def _end_bare(self) -> None:
        word, self._bare = self._bare, ""
        value = _NAMES.get(word) or _json_number(word)
        if value is None:
            self._at = At.NOWHERE
            return
        self._out.append(value)
        self._end_value()

    def _token(self, character: str) -> bool:
        """Scan one character outside of strings, numbers and names.

        Return False if the character is not part of the value.
        """
        at, self._at = self._at, At.NOWHERE
        is_value = at in (At.VALUE, At.VALUE_OR_END)
        if character in ("]", "}"):
            ends = (At.VALUE_OR_END, At.COMMA_OR_END) if character == "]" else (At.KEY_OR_END, At.COMMA_OR_END)
            if self._objects and self._objects[-1] == (character == "}") and at in ends:
                self._objects.pop()
                self._needs_comma = False
                self._out.append(character)
                self._end_value()
        elif character == "," and at is At.COMMA_OR_END:
            self._needs_comma = True
            self._at = At.KEY_OR_END if self._objects[-1] else At.VALUE_OR_END
        elif character == ":" and at is At.COLON:
            self._out.append(": ")
            self._at = At.VALUE
        elif is_value or at is At.KEY_OR_END:
            self._begin_value(character, is_key=not is_value)
        return self.state is not ScanState.BROKEN

    def _begin_value(self, character: str, *, is_key: bool) -> None:
        if self._needs_comma:
            self._out.append(", ")
            self._needs_comma = False
        if character in _PLAIN:
            self._is_key, self._quote, self._quotes, self._is_triple = is_key, character, 1, None
            self._out.append('"')
            self._at = At.STRING
        elif is_key:
            return
        elif character in "[{":
            if len(self._objects) < DEPTH_MAX:
                self._objects.append(character == "{")
                self._out.append(character)
                self._at = At.KEY_OR_END if character == "{" else At.VALUE_OR_END
        elif _BARE.match(character):
            self._bare = character
            self._at = At.BARE


def _json_number(word: str) -> str | None:
    match = _NUMBER.fullmatch(word)
    if match is None or (match[2] is None and (match[3] is None or match[3] == ".")):
        return None
    sign, whole, fraction, exponent = match.groups()
    digits = (whole or "0").replace("_", "")
    if len(digits) > 1 and digits[0] == "0":
        return None  # A number with a leading zero is a code, such as a postal code.
    tail = "" if fraction is None else (fraction.replace("_", "") if len(fraction) > 1 else ".0")
    return f"{'-' if sign == '-' else ''}{digits}{tail}{exponent or ''}"


def json_of_python(text: str) -> str | None:
    """Convert a whole text to JSON, or return None if the text is not a Python literal."""
    literal = PythonLiteral()
    rest = text[literal.scan(text, 0) :]
    literal.end()
    return literal.take() if literal.state is ScanState.DONE and not rest.strip() else None
