"""Text of a response as scripts read it, piece by piece.

A script is a generator that reads from a TextSource, and yields when it needs more text. So it can be written as if the
whole text were there. Its result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

__all__ = ["TextEnded", "NotACall", "Script", "TextSource"]

_T = TypeVar("_T")
Script = Generator[None, None, _T]

_SPACE = re.compile(r"\s+")


class NotACall(Exception):
    """The text began like a call but is not one.

    Raised by a script that reads a call, and caught by the script that runs it.
    """


class TextEnded(Exception):
    """The text ended before the current value or marker was complete."""


class TextSource:
    """Text that has arrived and is not yet read.

    The text stays short, since a script reads on at once, or waits for at most the length of a marker.

    Attributes:
        text: The current text. Its part from `at` on is not yet read.
        at: Index of the first character that is not yet read.
        over: True if no more text will come.
        characters_copied: Number of characters that were copied so far, for tests of the cost.
    """

    __slots__ = ("_mark_at", "_marked", "at", "characters_copied", "over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.over = False
        self.characters_copied = 0
        self._marked: list[str] | None = None
        self._mark_at = 0

    def push(self, piece: str) -> None:
        """Append a piece of the response.

        Args:
            piece: The piece.
        """
        if self._marked is not None:
            self._marked.append(self.text[self._mark_at : self.at])
            self._mark_at = 0
        self.text = self.text[self.at :] + piece if self.at < len(self.text) else piece
        self.at = 0
        self.characters_copied += len(self.text)

    def mark(self, back: int = 0) -> None:
        """Start to record the text that is read from here on.

        Args:
            back: Number of characters before this position to record, too. They must still be in `text`.
        """
        self._marked = []
        self._mark_at = self.at - back

    def unmark(self) -> str:
        """Stop recording. Return the text that was read since `mark`."""
        assert self._marked is not None
        self._marked.append(self.text[self._mark_at : self.at])
        text = "".join(self._marked)
        self._marked = None
        return text

    def unread(self, text: str) -> None:
        """Put back text that was read last. It is also removed from the recording.

        Args:
            text: The text.
        """
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

    # ---- scripts that read

    def peek(self) -> Script[str]:
        """Return the next character without reading it, or "" at the end of the text."""
        while self.at >= len(self.text):
            if self.over:
                return ""
            yield
        return self.text[self.at]

    def need(self) -> Script[str]:
        """Return the next character without reading it.

        Raises:
            TextEnded: The text has ended.
        """
        while self.at >= len(self.text):
            if self.over:
                raise TextEnded
            yield
        return self.text[self.at]

    def expect(self, text: str) -> Script[None]:
        """Read exactly the given text.

        Args:
            text: The text.

        Raises:
            NotACall: Other text comes.
            TextEnded: The text ends before.
        """
        for character in text:
            if (yield from self.need()) != character:
                raise NotACall
            self.at += 1

    def find(self, markers: Sequence[str]) -> Script[str]:
        """Return the marker that comes next, or "" if none does. Reads nothing.

        Args:
            markers: The markers. A marker comes before all markers that are its prefixes.
        """
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
        """Read the marker that comes next and return it, or "" if none does.

        Args:
            markers: As for find.
        """
        found = yield from self.find(markers)
        self.at += len(found)
        return found

    def find_whole(self, markers: Sequence[str]) -> Script[str]:
        """Return the marker that comes next, or "" if none does, for positions where only a marker can follow.

        Args:
            markers: As for find.

        Raises:
            TextEnded: The text ends within a marker.
        """
        found = yield from self.find(markers)
        if not found and self.over and self.at < len(self.text):
            rest = self.text[self.at :]
            if any(marker.startswith(rest) for marker in markers):
                raise TextEnded
        return found

    def take_whole(self, markers: Sequence[str]) -> Script[str]:
        """Read the marker that comes next and return it, as find_whole.

        Args:
            markers: As for find.

        Raises:
            TextEnded: The text ends within a marker.
        """
        found = yield from self.find_whole(markers)
        self.at += len(found)
        return found

    def skip_space(self) -> Script[str]:
        """Read white space. Return the character after it without reading it, or "" at the end of the text."""
        while True:
            if match := _SPACE.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.over:
                return ""
            yield

    def need_after_space(self) -> Script[str]:
        """Read white space. Return the character after it without reading it.

        Raises:
            TextEnded: The text has ended.
        """
        character = yield from self.skip_space()
        if not character:
            raise TextEnded
        return character

    def take_while(self, run: re.Pattern[str], characters_max: int) -> Script[str]:
        """Read and return characters as long as a pattern matches, or until the text ends.

        Args:
            run: Pattern of one or more characters of a class.
            characters_max: Most characters to read.

        Raises:
            NotACall: More characters match.
        """
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
        """Read up to and including the first of the markers.

        Args:
            markers: As for find.
            characters_max: Most characters before the marker.

        Returns:
            The text before the marker, and the marker.

        Raises:
            NotACall: More characters come before a marker.
            TextEnded: The text ends without a marker.
        """
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
