"""Splits a response's text into reasoning, content and calls. `ReasoningScript` finds tags around reasoning.

A marker opens a call everywhere except in a quotation. A call without a marker is JSON, with or without a fence. Such a
call counts only if the response consists of calls alone.

Text in code spans, fenced blocks, block quotes and quotation marks is a quotation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from trioserve.text.response_parsers.call_format import CallReader, CallReading, read_calls
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.scripts import CALLS_MAX, NotACall, PartSink, Script, TextEnded, TextSource
from trioserve.text.response_parts import ToolCallArguments, ToolCallBegin, ToolCallEnd

__all__ = ["ContentScript", "Quotation", "ReasoningScript", "ReasoningTags", "read_bare"]

_RUNS = re.compile(r"(`+|~+|\n)")
_OPENING_QUOTES: Final = frozenset("\"'\u201c\u2018\u00ab\u201e\u300c")
_BEFORE_QUOTE: Final = frozenset(" \t([{:>")
_FENCE_CHARACTERS_MIN: Final = 3
_INDENT_CHARACTERS_MAX: Final = 3  # Markdown allows at most this indentation before a fence or a block quote.


class Quotation:
    """Tracks the Markdown of a response's content. A marker of a call in quoted text is content.

    Quoted text is text in fences, code spans and block quotes, and text directly after an opening quotation mark. A
    code span ends with its line, so a lone backtick does not affect later lines.

    Cost: linear in the text, however the text is cut into pieces.
    """

    __slots__ = ("_fence", "_has_text", "_indent", "_is_block_quote", "_last", "_run", "_run_begins_line", "_span")

    def __init__(self) -> None:
        self._fence = ""  # Characters that opened the current fence, or "".
        self._span = 0  # Number of backticks that opened the current code span, or 0.
        self._run = ""  # Current run of backticks or tildes. More may follow.
        self._run_begins_line = False
        self._last = "\n", "\n"  # The last two characters of the text so far.
        self._begin_line()

    def includes(self, next_character: str) -> bool:
        """Return True if the next character is part of a quotation."""
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


_WORD = re.compile(r"[A-Za-z_]+")
_FENCE = "```"
_FENCE_WORDS = frozenset(("", "json", "tool_call", "tool_calls", "tool_code"))
_FENCE_WORD_CHARACTERS_MAX: Final = 16
_BARE_OPENERS = ("{", "[")


def read_bare(reading: CallReading) -> Script[None]:
    """Read JSON calls of offered tools. Their opening bracket was already read.

    Args:
        reading: State of the script.
    """
    reading.source.at -= 1  # The opening bracket is part of the JSON, so it is read again.
    yield from read_calls(reading, is_bare=True)


def _read_fenced(reading: CallReading) -> Script[None]:
    source = reading.source
    if (yield from source.take_while(_WORD, _FENCE_WORD_CHARACTERS_MAX)) not in _FENCE_WORDS:
        raise NotACall
    if (yield from source.need_after_space()) not in _BARE_OPENERS:
        raise NotACall
    yield from read_calls(reading, is_bare=True)
    if (yield from source.skip_space()):
        yield from source.expect(_FENCE)


_LENIENT_READERS: Mapping[str, CallReader] = {_FENCE: _read_fenced, **dict.fromkeys(_BARE_OPENERS, read_bare)}


class _HeldReading(CallReading):
    """Reads calls that count only if the response ends after them. The text of all calls stays recorded until then."""

    def end_call(self) -> None:
        self.sink.end_call()

    def end_closed_calls(self) -> None:
        self.sink.end_closed_calls()


class ContentScript:
    """Script that reads content and calls, and puts them into a sink.

    Args:
        source: Text of the response without its reasoning.
        sink: Receives the parts.
        tools: Offered tools by name.
        readers: Scripts that read a call, by the marker that opens the call. These markers count everywhere except in
            quotations.
        line_readers: Scripts by markers that count only at the beginning of a line.
        first_readers: Scripts for formats without markers, by the first character of a call. They count only as long
            as the response has no content.
        drops_space: True if white space before a call is not content, since the family's template writes it.
        has_channels: True if the family's markers separate content from other text. Such a response has no quotations.
        is_lenient: True to accept JSON without marks, in a fence or not, if the response consists of calls alone.

    Attributes:
        is_in_content: False while a possible call is read.
    """

    def __init__(
        self,
        source: TextSource,
        sink: PartSink,
        tools: Mapping[str, OfferedTool],
        readers: Mapping[str, CallReader],
        *,
        line_readers: Mapping[str, CallReader] | None = None,
        first_readers: Mapping[str, CallReader] | None = None,
        drops_space: bool = True,
        has_channels: bool = False,
        is_lenient: bool = False,
    ) -> None:
        self._source = source
        self._sink = sink
        self._reading = CallReading(source, sink, tools)
        self._drops_space = drops_space
        self._has_channels = has_channels
        self._anywhere = dict(readers)
        self._at_line = dict(line_readers or {})
        self._at_first = dict(first_readers or {})
        self._held: Mapping[str, CallReader] = _LENIENT_READERS if is_lenient and tools and not has_channels else {}
        self._markers_anywhere = _longest_first(self._anywhere)
        self._markers_at_line = _longest_first({**self._anywhere, **self._at_line})
        self._markers_at_first = _longest_first({**self._anywhere, **self._held, **self._at_line, **self._at_first})
        firsts = "".join(sorted({marker[0] for marker in self._markers_at_first}))
        self._plain = re.compile(f"[^{re.escape(firsts)}]+" if firsts else r"[\s\S]+")
        self._pending: list[str] = []  # White space that becomes content if no call follows.
        self._quotation = Quotation()
        self._begins_line = True
        self._has_text = False  # True once the response has text other than calls and white space.
        self._is_after_call = False
        self.is_in_content = True

    def run(self) -> Script[None]:
        """Read the whole text."""
        source = self._source
        while character := (yield from source.peek()):
            if match := self._plain.match(source.text, source.at):
                source.at = match.end()
                text = match.group()
                said = text.rstrip()
                if said:
                    self._content(said)
                if len(said) < len(text):
                    self._space(text[len(said) :])
                continue
            is_quoted = not self._has_channels and self._quotation.includes(character)
            try:
                marker = yield from (source.take_whole if self._is_after_call else source.take)(self._markers())
            except TextEnded:  # The text ended within the marker of the next call.
                source.at = len(source.text)
                break
            if not marker:
                source.at += 1
                self._content(character)
            elif is_quoted:
                yield from self._read_quoted(marker)
            elif marker in self._held and not (marker in self._anywhere or marker in self._at_first):
                yield from self._read_held(marker)
            else:
                yield from self._read(marker)
        if not self._is_after_call:
            self._sink.content("".join(self._pending))

    def _markers(self) -> list[str]:
        """Return the markers that count at the current position."""
        if not self._has_text:
            return self._markers_at_first
        return self._markers_at_line if self._begins_line else self._markers_anywhere

    def _content(self, text: str) -> None:
        for space in self._pending:
            self._sink.content(space)
        self._pending.clear()
        self._sink.content(text)
        self._quotation.take(text)
        self._begins_line = self._is_after_call = False
        self._has_text = True

    def _space(self, text: str) -> None:
        if self._drops_space or self._is_after_call:
            self._pending.append(text)
        else:
            self._sink.content(text)
        self._quotation.take(text)
        self._begins_line = self._begins_line or "\n" in text

    def _read(self, marker: str) -> Script[None]:
        source, sink = self._source, self._sink
        begun, ended = sink.calls_begun, sink.calls_ended
        is_marked = marker in self._anywhere
        reader = self._reader(marker)
        source.mark(back=len(marker))
        self.is_in_content = False
        refused = was_partial = False
        try:
            yield from reader(self._reading)
        except NotACall:
            refused = True
        except TextEnded:
            was_partial = True
            source.at = len(source.text)
            # If no marker announced a call, the text counts as a call only once it has a name.
            refused = not is_marked and sink.calls_begun == begun
        self.is_in_content = True
        text = source.unmark()
        sink.abandon_call()
        if sink.calls_ended > ended or (was_partial and not refused):
            self._note_call_end()
        if refused:
            self._content(text)
            self._begins_line = text.endswith("\n")

    def _read_quoted(self, marker: str) -> Script[None]:
        """Read a call in a quotation, and show its whole text as content.

        The call is read only so that markers in its arguments are not read as calls.
        """
        source = self._source
        source.mark(back=len(marker))
        self.is_in_content = False
        try:
            yield from self._reader(marker)(_HeldReading(source, PartSink(), self._reading.tools))
        except NotACall:
            pass
        except TextEnded:
            source.at = len(source.text)
        self.is_in_content = True
        for text in (*self._pending, source.unmark()):
            self._sink.content(text)
        self._pending.clear()
        self._has_text = True
        self._begins_line = False

    def _reader(self, marker: str) -> CallReader:
        return next(readers[marker] for readers in (self._anywhere, self._at_first, self._at_line) if marker in readers)

    def _read_held(self, marker: str) -> Script[None]:
        """Read calls without markers, and hold them back until it is certain that the response has only calls."""
        source = self._source
        held = PartSink()
        reading = _HeldReading(source, held, self._reading.tools)
        source.mark(back=len(marker))
        self.is_in_content = False
        refused = False
        try:
            while True:
                yield from self._held[marker](reading)
                if not (yield from source.skip_space()):
                    break
                if not (marker := (yield from source.take(_longest_first(self._held)))):
                    raise NotACall
        except NotACall:
            refused = True
        except TextEnded:
            source.at = len(source.text)
            refused = not held.calls_begun
        self.is_in_content = True
        text = source.unmark()
        if refused:
            self._content(text)
            self._begins_line = text.endswith("\n")
            return
        self._note_call_end()
        for part in held.drain():
            if isinstance(part, ToolCallBegin):
                self._sink.abandon_call()
                if self._sink.calls_begun >= CALLS_MAX:
                    break
                self._sink.begin_call(part.name, part.id)
            elif isinstance(part, ToolCallArguments):
                self._sink.arguments(part.text)
            elif isinstance(part, ToolCallEnd):
                self._sink.end_call()
        self._sink.abandon_call()

    def _note_call_end(self) -> None:
        self._pending.clear()
        self._quotation.take_call()
        self._is_after_call = self._begins_line = True


def _longest_first(markers: Mapping[str, CallReader]) -> list[str]:
    return sorted(markers, key=len, reverse=True)


_SPACE = re.compile(r"\s+")


class ReasoningTags(msgspec.Struct, frozen=True, kw_only=True):
    """Tags with which a family writes reasoning.

    Attributes:
        opening: Opening tags. Current models write the first tag. The parser also reads the other tags.
        closing: Closing tags. Current models write the first tag. The parser also reads the other tags.
        begins_inside: True if the response begins inside of reasoning unless the prompt shows otherwise.
        interleaves: True if the family reasons several times in a response, so an opening tag counts at the beginning
            of any line. Otherwise reasoning begins only at the beginning of the response.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    begins_inside: bool = False
    interleaves: bool = False


class ReasoningScript:
    """Script that separates reasoning from the rest of a response.

    Templates write line breaks after an opening tag and around a closing tag. The script drops these line breaks. If
    the response ends within reasoning, its text so far is reasoning.

    Args:
        source: Text of the response.
        sink: Receives the reasoning.
        tags: Tags of the family.
        begins_inside: True if the response begins inside of reasoning. False if the prompt has ended reasoning, so the
            response has none unless the family interleaves. None if the response may open reasoning.
        ended_by: Beginnings of calls that end reasoning and do not belong to the reasoning.
        push: Receives all text outside of reasoning.
        may_begin: Returns True if reasoning may begin at the current position outside of reasoning. Used for families
            that interleave.
    """

    def __init__(
        self,
        source: TextSource,
        sink: PartSink,
        tags: ReasoningTags,
        *,
        begins_inside: bool | None,
        ended_by: Sequence[str],
        push: Callable[[str], None],
        may_begin: Callable[[], bool],
    ) -> None:
        self._source = source
        self._sink = sink
        self._opening = tags.opening
        self._closing = tags.closing
        self._ending = (*tags.closing, *ended_by)
        self._begins_inside = begins_inside
        self._interleaves = tags.interleaves
        self._push = push
        self._may_begin = may_begin
        firsts = {tag[0] for tag in (*self._opening, *self._ending)}
        self._plain = re.compile("[^" + re.escape("".join(sorted(firsts))) + "]+")

    def run(self) -> Script[None]:
        """Read the whole text."""
        is_inside = bool(self._begins_inside)
        if self._begins_inside is None or (self._interleaves and not is_inside):
            is_inside = yield from self._read_first_tag()
        while (yield from self._source.peek()):
            is_inside = (yield from self._read_reasoning()) if is_inside else (yield from self._read_outside())

    def _read_first_tag(self) -> Script[bool]:
        """Read an opening tag at the beginning of the response. White space before the tag is not content.

        Returns:
            True if an opening tag was read.
        """
        space = yield from self._space()
        if (yield from self._source.take(self._opening)):
            return True
        self._push(space)
        return False

    def _space(self) -> Script[str]:
        pieces: list[str] = []
        while (yield from self._source.peek()) and (match := _SPACE.match(self._source.text, self._source.at)):
            pieces.append(match.group())
            self._source.at = match.end()
        return "".join(pieces)

    def _read_reasoning(self) -> Script[bool]:
        """Read reasoning and its closing tag. The opening tag was already read.

        Returns:
            True if another opening tag follows and was read.
        """
        source = self._source
        yield from self._space()
        while (yield from source.take(self._opening)):  # Some models repeat the opening tag.
            yield from self._space()
        space: list[str] = []
        has_begun = False
        while character := (yield from source.peek()):
            if match := self._plain.match(source.text, source.at):
                source.at = match.end()
                text = match.group().rstrip()
                if text:
                    self._sink.reasoning("".join(space) + text)
                    space.clear()
                    has_begun = True
                space.append(match.group()[len(text) :])
                continue
            ending = yield from source.find(self._ending)
            if ending in self._closing:
                source.at += len(ending)
                return (yield from self._read_end())
            if ending:
                return False
            source.at += 1
            self._sink.reasoning("".join(space) + character)
            space.clear()
            has_begun = True
        if has_begun:
            self._sink.reasoning("".join(space))
        return False

    def _read_end(self) -> Script[bool]:
        """Read blank lines and repeated closing tags after reasoning. This text is not content.

        Returns:
            True if another opening tag follows and was read.
        """
        while True:
            space = yield from self._space()
            if not (yield from self._source.take(self._closing)):
                break
        if self._interleaves and (yield from self._source.take(self._opening)):
            return True
        if (yield from self._source.peek()):
            self._push(space[space.rfind("\n") + 1 :])
        return False

    def _read_outside(self) -> Script[bool]:
        """Read text outside of reasoning, up to the end of the response or of the next opening tag.

        Only families that interleave have further opening tags.

        Returns:
            True if an opening tag was read.
        """
        source = self._source
        while not self._interleaves and (yield from source.peek()):
            self._push(source.text[source.at :])
            source.at = len(source.text)
        begins_line = False
        while character := (yield from source.peek()):
            if match := self._plain.match(source.text, source.at):
                text = match.group()
                said = text.rstrip()
                begins_line = "\n" in text[len(said) :] or (begins_line and not said)
            elif begins_line and self._may_begin() and (yield from source.take(self._opening)):
                return True
            else:
                text, begins_line = character, False
            source.at += len(text)
            self._push(text)
        return False
