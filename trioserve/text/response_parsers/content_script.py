"""What of a response's text is content, and what begins a call: markers anywhere, and where tools are offered a bare or
fenced JSON call at the beginning of a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from trioserve.text.response_parsers.call_reading import CallReader, CallReading, read_calls
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import CutOff, NotACall, Script, TextSource

__all__ = ["ContentScript"]

_WORD = re.compile(r"[A-Za-z_]+")
_FENCE = "```"
_FENCE_WORDS = frozenset(("", "json", "tool_call", "tool_calls", "tool_code"))
_FENCE_WORD_CHARACTERS_MAX: Final = 16
_BARE_OPENERS = ("{", "[")


def _read_bare(reading: CallReading) -> Script[None]:
    reading.source.at -= 1  # what opened it is part of it
    yield from read_calls(reading, is_bare=True)


def _read_fenced(reading: CallReading) -> Script[None]:
    source = reading.source
    if (yield from source.take_while(_WORD, _FENCE_WORD_CHARACTERS_MAX)) not in _FENCE_WORDS:
        raise NotACall
    if (yield from source.need_behind_space()) not in _BARE_OPENERS:
        raise NotACall
    yield from read_calls(reading, is_bare=True)
    if (yield from source.skip_space()):
        yield from source.expect(_FENCE)
        reading.source.mark()


class ContentScript:
    """readers: what may open a call, each with what reads it. line_readers: the same, at the beginning of a line only.
    drops_space: white space before a call is none of the content, because the family's template writes it there."""

    def __init__(
        self,
        source: TextSource,
        sink: PartSink,
        tools: Mapping[str, OfferedTool],
        readers: Mapping[str, CallReader],
        *,
        line_readers: Mapping[str, CallReader] | None = None,
        drops_space: bool = True,
        is_lenient: bool = True,
    ) -> None:
        self._source = source
        self._sink = sink
        self._reading = CallReading(source, sink, tools)
        self._drops_space = drops_space
        self._anywhere = dict(readers)
        self._at_line = {**(line_readers or {})}
        if is_lenient and tools:
            self._at_line = {_FENCE: _read_fenced, **dict.fromkeys(_BARE_OPENERS, _read_bare), **self._at_line}
        self._markers_anywhere = sorted(self._anywhere, key=len, reverse=True)
        self._markers_at_line = sorted({**self._anywhere, **self._at_line}, key=len, reverse=True)
        firsts = "".join(sorted({marker[0] for marker in self._markers_at_line}))
        self._plain = re.compile(f"[^{re.escape(firsts)}]+" if firsts else r"[\s\S]+")
        self._pending: list[str] = []  # white space that is content if no call follows it
        self._begins_line = True
        self._is_behind_call = False
        self.is_in_content = True  # and not inside of what may be a call

    def run(self) -> Script[None]:
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
            else:
                markers = self._markers_at_line if self._begins_line else self._markers_anywhere
                try:
                    marker = yield from (source.take_whole if self._is_behind_call else source.take)(markers)
                except CutOff:  # of the next call
                    source.at = len(source.text)
                    break
                if marker:
                    yield from self._read(marker)
                else:
                    source.at += 1
                    self._content(character)
        if not self._is_behind_call:
            self._sink.content("".join(self._pending))

    def _content(self, text: str) -> None:
        for space in self._pending:
            self._sink.content(space)
        self._pending.clear()
        self._sink.content(text)
        self._begins_line = self._is_behind_call = False

    def _space(self, text: str) -> None:
        if self._drops_space or self._is_behind_call:
            self._pending.append(text)
        else:
            self._sink.content(text)
        self._begins_line = self._begins_line or "\n" in text

    def _read(self, marker: str) -> Script[None]:
        source, sink = self._source, self._sink
        begun, ended = sink.calls_begun, sink.calls_ended
        is_marked = marker in self._anywhere
        reader = self._anywhere[marker] if is_marked else self._at_line[marker]
        source.mark(back=len(marker))
        self.is_in_content = False
        refused = was_cut_off = False
        try:
            yield from reader(self._reading)
        except NotACall:
            refused = True
        except CutOff:
            was_cut_off = True
            source.at = len(source.text)
            # Without a marker it is not known to be a call before it has a name.
            refused = not is_marked and sink.calls_begun == begun
        self.is_in_content = True
        text = source.unmark()
        sink.give_up_call()
        has_calls = sink.calls_ended > ended
        if has_calls or (was_cut_off and not refused):
            self._pending.clear()
            self._is_behind_call = self._begins_line = True
        if refused:
            self._content(text)
            self._begins_line = text.endswith("\n")
