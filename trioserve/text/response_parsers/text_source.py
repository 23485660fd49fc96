"""The text of a response as a script reads it: piece by piece, held back no longer than it has to be.

A script is a generator that reads from a TextSource and yields when it needs more text. So it can be written as if all
of the text were there, and is the same function of the text however that is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

__all__ = ["CutOff", "NotACall", "Script", "TextSource"]

_T = TypeVar("_T")
Script = Generator[None, None, _T]

_SPACE = re.compile(r"\s+")


class NotACall(Exception):
    """What began like a call goes on as none. Raised by a script that reads a call, caught by the one around it."""


class CutOff(Exception):
    """The text ended inside of what was being read."""


class TextSource:
    """text[at:] is what has come and is not yet read. It stays short: a script reads on, or waits for what a marker is
    long. over: nothing more will come."""

    __slots__ = ("_mark_at", "_marked", "at", "characters_copied", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False
        self.characters_copied = 0  # what push costs, for tests of the cost
        self._marked: list[str] | None = None
        self._mark_at = 0

    def push(self, piece: str) -> None:
        if self._marked is not None:
            self._marked.append(self.text[self._mark_at : self.at])
            self._mark_at = 0
        self.text = self.text[self.at :] + piece if self.at < len(self.text) else piece
        self.at = 0
        self.characters_copied += len(self.text)

    def mark(self, back: int = 0) -> None:
        """Remember what is read from here on, and the last `back` characters, which must still be in text."""
        self._marked = []
        self._mark_at = self.at - back

    def unmark(self) -> str:
        """What was read since the mark. Forgets the mark."""
        assert self._marked is not None
        self._marked.append(self.text[self._mark_at : self.at])
        text = "".join(self._marked)
        self._marked = None
        return text

    def unread(self, text: str) -> None:
        """Put back the text that was read last. It counts as not read, for the mark as well."""
        if self._marked is not None:
            self._marked.append(self.text[self._mark_at : self.at])
            self._mark_at = 0
            excess = len(text)
            while excess and self._marked:
                last = self._marked.pop()
                if len(last) > excess:
                    self._marked.append(last[:-excess])
                excess -= min(excess, len(last))
        self.text = text + self.text[self.at :]
        self.at = 0
        self.characters_copied += len(self.text)

    # ---- reading; these are scripts

    def peek(self) -> Script[str]:
        """The next character, not read yet; "" if the text is over."""
        while self.at >= len(self.text):
            if self.over:
                return ""
            yield
        return self.text[self.at]

    def need(self) -> Script[str]:
        """The next character, not read yet. Raises CutOff if there is none."""
        while self.at >= len(self.text):
            if self.over:
                raise CutOff
            yield
        return self.text[self.at]

    def expect(self, text: str) -> Script[None]:
        """Read exactly this. Raises NotACall if something else comes, CutOff if the text ends before."""
        for character in text:
            if (yield from self.need()) != character:
                raise NotACall
            self.at += 1

    def find(self, markers: Sequence[str]) -> Script[str]:
        """Which of the markers stands here; "" if none does. Nothing is read. markers: a longer one before those that
        it begins with."""
        while True:
            waits = False
            for marker in markers:
                if self.text.startswith(marker, self.at):
                    return marker
                rest = len(self.text) - self.at
                if not self.over and rest < len(marker) and marker.startswith(self.text[self.at :]):
                    waits = True
                    break
            if not waits:
                return ""
            yield

    def take(self, markers: Sequence[str]) -> Script[str]:
        """As find, and reads what it found."""
        found = yield from self.find(markers)
        self.at += len(found)
        return found

    def find_whole(self, markers: Sequence[str]) -> Script[str]:
        """As find, where nothing but a marker is written. Raises CutOff if the text ends inside of one."""
        found = yield from self.find(markers)
        if not found and self.over and self.at < len(self.text):
            rest = self.text[self.at :]
            if any(marker.startswith(rest) for marker in markers):
                raise CutOff
        return found

    def take_whole(self, markers: Sequence[str]) -> Script[str]:
        """As find_whole, and reads what it found."""
        found = yield from self.find_whole(markers)
        self.at += len(found)
        return found

    def skip_space(self) -> Script[str]:
        """Read white space. Returns the character behind it, "" if the text is over."""
        while True:
            if match := _SPACE.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.over:
                return ""
            yield

    def need_behind_space(self) -> Script[str]:
        """As skip_space. Raises CutOff if the text is over."""
        character = yield from self.skip_space()
        if not character:
            raise CutOff
        return character

    def take_while(self, run: re.Pattern[str], characters_max: int) -> Script[str]:
        """Read characters as long as `run`, a pattern of one or more of a class, takes them. Raises NotACall if they
        are more than characters_max. Ends with the text, too."""
        pieces: list[str] = []
        count = 0
        while True:
            if match := run.match(self.text, self.at):
                pieces.append(match.group())
                self.at = match.end()
                count += len(pieces[-1])
                if count > characters_max:
                    raise NotACall
            if self.at < len(self.text) or self.over:
                return "".join(pieces)
            yield

    def take_until(self, markers: Sequence[str], characters_max: int) -> Script[tuple[str, str]]:
        """Read up to the first of the markers, and that. Returns the text before it and the marker. Raises NotACall if
        the text before it is longer than characters_max, CutOff if none comes."""
        stops = re.compile("[^" + re.escape("".join(sorted({marker[0] for marker in markers}))) + "]+")
        pieces: list[str] = []
        count = 0
        while True:
            yield from self.need()
            if match := stops.match(self.text, self.at):
                piece = match.group()
            elif marker := (yield from self.take(markers)):
                return "".join(pieces), marker
            else:
                piece = self.text[self.at]
            self.at += len(piece)
            pieces.append(piece)
            count += len(piece)
            if count > characters_max:
                raise NotACall
