"""Separates reasoning from the rest of a response, for the families that put tags around reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from trioserve.text.response_parsers.part_sink import PartSink
from trioserve.text.response_parsers.text_source import Script, TextSource

__all__ = ["ThoughtScript", "ThoughtTags"]

_SPACE = re.compile(r"\s+")


class ThoughtTags(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes reasoning.

    Args:
        opening, closing: the first of each is what the family writes today. The others are read, too.
        begins_inside: whether the response begins inside of reasoning, where the prompt does not say.
        interleaves: the family reasons more than once in a response, so an opening tag counts at the beginning of any
            line. In other families reasoning begins only at the beginning of the response.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    begins_inside: bool = False
    interleaves: bool = False


class ThoughtScript:
    """Separates reasoning from the rest of a response.

    The line breaks that templates write behind an opening tag and around a closing tag are dropped. Reasoning that the
    end of the text cuts off is reasoning.

    Args:
        begins_inside: whether the response begins inside of reasoning. False: the prompt has ended it, so there is
            none, unless the family interleaves. None: the response may open it.
        ended_by: texts that end reasoning and do not belong to it: the beginning of a call.
        push: takes the text that is no reasoning.
        may_begin: whether reasoning may begin where the reader of that text is now. For families that interleave.
    """

    def __init__(
        self,
        source: TextSource,
        sink: PartSink,
        tags: ThoughtTags,
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
        is_inside = bool(self._begins_inside)
        if self._begins_inside is None or (self._interleaves and not is_inside):
            is_inside = yield from self._thought_at_once()
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
        """Read from behind an opening tag to behind its closing tag.

        Returns:
            Whether another opening tag was read there.
        """
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
        if self._interleaves and (yield from self._source.take(self._opening)):
            return True
        if (yield from self._source.peek()):
            self._push(space[space.rfind("\n") + 1 :])
        return False

    def _outside(self) -> Script[bool]:
        """Read up to behind one more opening tag, which counts where the family interleaves, or to the end of the text.

        Returns:
            Whether an opening tag was read.
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
