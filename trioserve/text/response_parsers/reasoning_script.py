"""Separates reasoning from the rest of a response, for families that put tags around reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from trioserve.text.response_parsers.scripts import PartSink, Script, TextSource

__all__ = ["ReasoningScript", "ReasoningTags"]

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
