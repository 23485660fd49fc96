"""Defines the source from which scripts read a response piece by piece, and the sink that receives its parts.

A script is a generator that reads from a TextSource, and yields when it needs more text. So a script can be written as
if the whole text had arrived. Its result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = [
    "TextEnded",
    "NotACall",
    "Script",
    "TextSource",
    "ARGUMENT_CHARACTERS_MAX",
    "CALLS_MAX",
    "NAME_CHARACTERS_MAX",
    "PartSink",
]

_T = TypeVar("_T")
Script = Generator[None, None, _T]

_SPACE = re.compile(r"\s+")


class NotACall(Exception):
    """The text began like a call but is not a call.

    A script that reads a call raises this error, and the script that runs it catches the error.
    """


class TextEnded(Exception):
    """The text ended before the current value or marker was complete."""


class TextSource:
    """Received text of a response that is not yet read.

    The unread text stays short, since a script reads it at once, or waits for at most the length of a marker.

    Attributes:
        text: The current text. The characters from index `at` on are not yet read.
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
        """Append a piece of the response."""
        if self._marked is not None:
            self._marked.append(self.text[self._mark_at : self.at])
            self._mark_at = 0
        self.text = self.text[self.at :] + piece if self.at < len(self.text) else piece
        self.at = 0
        self.characters_copied += len(self.text)

    def mark(self, back: int = 0) -> None:
        """Start to record all text that is read after this call.

        Args:
            back: Number of characters before the current position that are also recorded. They must still be in `text`.
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
        """Put the text that was read last back into the source. The text is also removed from the recording."""
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
        """Read exactly the given text, or raise an exception.

        Raises:
            NotACall: A different text follows.
            TextEnded: The response ends before the text is complete.
        """
        for character in text:
            if (yield from self.need()) != character:
                raise NotACall
            self.at += 1

    def find(self, markers: Sequence[str]) -> Script[str]:
        """Return the marker at the current position, or "" if there is none. Reads nothing.

        Args:
            markers: The markers. Each marker must precede all markers that are prefixes of it.
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
        """Read the marker at the current position and return it, or "" if there is none.

        Args:
            markers: Possible markers, in the order that `find` requires.
        """
        found = yield from self.find(markers)
        self.at += len(found)
        return found

    def find_whole(self, markers: Sequence[str]) -> Script[str]:
        """Return the marker at the current position, or "" if there is none. Use this where only a marker can follow.

        Args:
            markers: Possible markers, in the order that `find` requires.

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
        """Read the marker at the current position. The result has the form of find_whole.

        Args:
            markers: Possible markers, in the order that `find` requires.

        Raises:
            TextEnded: The text ends within a marker.
        """
        found = yield from self.find_whole(markers)
        self.at += len(found)
        return found

    def skip_space(self) -> Script[str]:
        """Read white space. Return the next character without reading it, or "" at the end of the text."""
        while True:
            if match := _SPACE.match(self.text, self.at):
                self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.over:
                return ""
            yield

    def need_after_space(self) -> Script[str]:
        """Read white space. Return the next character without reading it.

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
            run: Pattern that matches one or more characters of a class.
            characters_max: Maximum number of characters to read.

        Raises:
            NotACall: More than `characters_max` characters match.
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
        """Read text up to and including the first of several markers.

        Args:
            markers: Possible markers, in the order that `find` requires.
            characters_max: Maximum number of characters before the marker.

        Returns:
            The text before the marker, and the marker.

        Raises:
            NotACall: More than `characters_max` characters precede the first marker.
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


# Maximum number of calls per response. OpenAI allows as many tools in a request. Further calls become content.
CALLS_MAX: Final = 128
NAME_CHARACTERS_MAX: Final = 256  # Longest name of a function, four times OpenAI's limit.
# Longest arguments of a call. This is more than any context, and bounds the memory of text that is held back.
ARGUMENT_CHARACTERS_MAX: Final = 8 << 20


class PartSink:
    """Receives the parts of a response. A call begins, gets arguments, and is then completed or given up.

    A call that is given up has no ToolCallEnd.

    Attributes:
        calls_ended: Number of complete calls.
        in_call: True while a call is open.
    """

    __slots__ = ("_argument_characters", "_calls", "_held", "_kind", "_parts", "_texts", "calls_ended", "in_call")

    def __init__(self) -> None:
        self._parts: list[ResponsePart] = []
        self._kind: type[ContentText] | type[ReasoningText] | type[ToolCallArguments] | None = None
        self._texts: list[str] = []
        self._calls = 0
        self._held: list[ResponsePart] | None = None
        self._argument_characters = 0
        self.calls_ended = 0
        self.in_call = False

    @property
    def calls_begun(self) -> int:
        return self._calls

    def drain(self) -> list[ResponsePart]:
        """Return the parts that were received since the last call of this method."""
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        self._add(ContentText, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningText, text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call.

        Args:
            name: Name of the function.
            call_id: Id that the model wrote, or None.

        Raises:
            NotACall: The name is empty or too long, or the response has too many calls.
        """
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or self._calls >= CALLS_MAX:
            raise NotACall
        assert not self.in_call
        self._join()
        self._shown().append(ToolCallBegin(self._calls, name, call_id))
        self._calls += 1
        self._argument_characters = 0
        self.in_call = True

    def arguments(self, text: str) -> None:
        """Add a piece of the open call's arguments.

        Args:
            text: The piece.

        Raises:
            NotACall: The arguments are too long.
        """
        assert self.in_call
        self._argument_characters += len(text)
        if self._argument_characters > ARGUMENT_CHARACTERS_MAX:
            raise NotACall
        self._add(ToolCallArguments, text)

    def end_call(self) -> None:
        assert self.in_call
        self._join()
        self._parts.append(ToolCallEnd(self._calls - 1))
        self.in_call = False
        self.calls_ended += 1

    def close_call(self) -> None:
        """Close the open call. The call is complete only after end_closed_calls is called.

        Later parts are held back until then.
        """
        assert self.in_call
        self._join()
        self.in_call = False
        if self._held is None:
            self._held = []
        self._held.append(ToolCallEnd(self._calls - 1))

    def end_closed_calls(self) -> None:
        """Complete all closed calls, and release the parts that were held back."""
        assert self._held is not None
        self._parts += self._held
        self.calls_ended += sum(isinstance(part, ToolCallEnd) for part in self._held)
        self._held = None

    def abandon_call(self) -> None:
        """Give up the open call and all closed calls, because they are invalid or incomplete."""
        self.in_call = False
        if self._held is not None:
            self._join()
            self._calls -= sum(isinstance(part, ToolCallBegin) for part in self._held)
            self._held = None

    def _add(self, kind: type[ContentText] | type[ReasoningText] | type[ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._texts.append(text)

    def _join(self) -> None:
        if self._kind is None:
            return
        text = "".join(self._texts)
        shown = self._shown()
        if self._kind is ToolCallArguments:
            shown.append(ToolCallArguments(self._calls - 1, text))
        elif self._kind is ContentText:
            shown.append(ContentText(text))
        else:
            shown.append(ReasoningText(text))
        self._kind = None
        self._texts.clear()

    def _shown(self) -> list[ResponsePart]:
        return self._parts if self._held is None else self._held
