"""Finds the parts of a response that quote or explain: code spans, fenced blocks, block quotes and quotation marks."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Quotation"]

_RUNS = re.compile(r"(`+|~+|\n)")
_OPENING_QUOTES: Final = frozenset("\"'\u201c\u2018\u00ab\u201e\u300c")
_BEFORE_QUOTE: Final = frozenset(" \t([{:>")
_FENCE_CHARACTERS_MIN: Final = 3
_INDENT_CHARACTERS_MAX: Final = 3  # with more indentation, a fence or block quote is code or text


class Quotation:
    """Tracks the Markdown of a response's content. A marker of a call in quoted text is content.

    Quoted text is text in fences, code spans and block quotes, and text directly after an opening quotation mark. A
    code span ends with its line, so a lone backtick does not affect later lines.

    Cost: linear in the text, however the text is cut into pieces.
    """

    __slots__ = ("_fence", "_has_text", "_indent", "_is_block_quote", "_last", "_run", "_run_begins_line", "_span")

    def __init__(self) -> None:
        self._fence = ""  # characters that opened the fence, or ""
        self._span = 0  # number of backticks that opened the code span, or 0
        self._run = ""  # current run of backticks or tildes, which may continue
        self._run_begins_line = False
        self._last = "\n", "\n"  # the last two characters
        self._begin_line()

    def includes(self, next_character: str) -> bool:
        """Return True if the next character is part of a quotation.

        Args:
            next_character: The character.
        """
        if self._run:
            if next_character == self._run[0]:
                return True
            self._end_run()
        if self._fence or self._span or self._is_block_quote:
            return True
        before, last = self._last
        return last in _OPENING_QUOTES and (before == "\n" or before in _BEFORE_QUOTE)

    def take(self, text: str) -> None:
        """Process the next piece of content.

        Args:
            text: The piece.
        """
        for piece in _RUNS.split(text):
            if not piece:
                continue
            if self._run and piece[0] != self._run[0]:
                self._end_run()
            if piece == "\n":
                self._end_line()
            elif piece[0] in "`~":
                self._take_run(piece)
            else:
                self._take_plain(piece)
            self._last = (piece[-2] if len(piece) > 1 else self._last[1]), piece[-1]

    def take_call(self) -> None:
        """Process a complete call. The text after a call begins a new line."""
        self._run, self._span, self._fence = "", 0, ""
        self._last = "\n", "\n"
        self._begin_line()

    def _begin_line(self) -> None:
        self._has_text = self._is_block_quote = False
        self._indent = 0

    def _end_line(self) -> None:
        self._span = 0
        self._begin_line()

    def _take_plain(self, text: str) -> None:
        if self._has_text:
            return
        said = text.lstrip(" \t")
        self._indent += len(text) - len(said)
        if said:
            self._has_text = True
            self._is_block_quote = not self._fence and said[0] == ">" and self._indent <= _INDENT_CHARACTERS_MAX

    def _take_run(self, run: str) -> None:
        if not self._run:
            self._run_begins_line = not self._has_text and self._indent <= _INDENT_CHARACTERS_MAX
            self._has_text = True
        self._run += run if len(self._run) < _FENCE_CHARACTERS_MIN * 100 else ""

    def _end_run(self) -> None:
        run, self._run = self._run, ""
        is_fence = self._run_begins_line and len(run) >= _FENCE_CHARACTERS_MIN
        if self._fence:
            if is_fence and run[0] == self._fence[0] and len(run) >= len(self._fence):
                self._fence = ""
        elif is_fence:
            self._fence = run
        elif run[0] == "`":
            if not self._span:
                self._span = len(run)
            elif self._span == len(run):
                self._span = 0
