"""What of a response's text is a thought, for the families that put tags around it. The rest is passed on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import Script, TextSource

__all__ = ["ThoughtScript", "ThoughtTags"]

_SPACE = re.compile(r"\s+")


class ThoughtTags(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes thoughts. opening, closing: the first of each is what the family writes today; others are
    understood, too. begins_inside: whether the response begins with a thought, where the prompt does not say."""

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    begins_inside: bool = False


class ThoughtScript:
    """ended_by: what ends a thought although it is none of it, the beginning of a call. push: takes what is no thought.
    may_begin: whether a thought may begin where the other script is now.

    The line breaks that templates write behind an opening tag and around a closing one are dropped. A thought that the
    end of the text cuts off is a thought. An opening tag counts at the beginning of a line, outside of calls.
    """

    def __init__(
        self,
        source: TextSource,
        sink: PartSink,
        tags: ThoughtTags,
        *,
        begins_inside: bool,
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
        self._push = push
        self._may_begin = may_begin
        firsts = {tag[0] for tag in (*self._opening, *self._ending)}
        self._plain = re.compile("[^" + re.escape("".join(sorted(firsts))) + "]+")

    def run(self) -> Script[None]:
        is_inside = self._begins_inside or (yield from self._thought_at_once())
        while (yield from self._source.peek()):
            is_inside = (yield from self._thought()) if is_inside else (yield from self._outside())

    def _thought_at_once(self) -> Script[bool]:
        """At the very beginning, white space before an opening tag is none of the content."""
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

    def _thought(self) -> Script[bool]:
        """From behind an opening tag to behind its closing one. Returns whether another opening tag was read there."""
        source = self._source
        yield from self._space()
        while (yield from source.take(self._opening)):  # written once more
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
                return (yield from self._behind_thought())
            if ending:
                return False
            source.at += 1
            self._sink.reasoning("".join(space) + character)
            space.clear()
            has_begun = True
        if has_begun:
            self._sink.reasoning("".join(space))
        return False

    def _behind_thought(self) -> Script[bool]:
        """Blank lines behind a thought are no content, nor is one more closing tag."""
        while True:
            space = yield from self._space()
            if not (yield from self._source.take(self._closing)):
                break
        if (yield from self._source.take(self._opening)):
            return True
        if (yield from self._source.peek()):
            self._push(space[space.rfind("\n") + 1 :])
        return False

    def _outside(self) -> Script[bool]:
        """Up to behind one more opening tag, or to the end of the text. Returns which."""
        source = self._source
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
