"""Reads values that are any text up to a closing tag. The text after a tag shows whether the tag closes the value.

A value may contain the text of the tag itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from trioserve.text.response_parsers.text_source import CutOff, Script, TextSource

__all__ = ["Closing", "read_raw_value"]

_SPACE = re.compile(r"\s+")


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """Condition under which a tag closes a value.

    Attributes:
        tag: The tag.
        followed_by: The tag closes the value if one of these texts follows, after optional white space. Empty if any
            text may follow.
        at_line: True if the tag counts only at the beginning of a line.
        is_read: True to read the tag together with the value. False to leave it in the source.
        ends_text: True if the end of the text may also follow the tag.
    """

    tag: str
    followed_by: Sequence[str] = ()
    at_line: bool = False
    is_read: bool = True
    ends_text: bool = False


def read_raw_value(
    source: TextSource, closings: Sequence[Closing], use: Callable[[str], None], *, trims_lines: bool
) -> Script[Closing]:
    """Read a value and the tag that closes it.

    Args:
        source: The text, after the tag that opens the value.
        closings: Conditions under which tags close the value.
        use: Receives the value piece by piece.
        trims_lines: True if one line break at each end of the value belongs to the tags.

    Returns:
        The condition that closed the value.

    Raises:
        CutOff: The text ends before the value does.
    """
    tags = sorted({closing.tag for closing in closings}, key=len, reverse=True)
    plain = re.compile("[^\\n" + re.escape("".join(sorted({tag[0] for tag in tags}))) + "]+")
    line_break = ""  # a line break that is held back, since it may belong to the closing tag
    at_line = True
    if trims_lines and (yield from source.need()) == "\n":
        source.at += 1
    while True:
        character = yield from source.need()
        if match := plain.match(source.text, source.at):
            source.at = match.end()
            use(line_break + match.group())
            line_break, at_line = "", False
            continue
        if character == "\n":
            source.at += 1
            if not trims_lines:
                use("\n")
            elif line_break:
                use(line_break)
            line_break, at_line = ("\n" if trims_lines else ""), True
            continue
        tag = yield from source.find(tags)
        candidates = [closing for closing in closings if closing.tag == tag and (at_line or not closing.at_line)]
        if not candidates:
            text = tag or character
            source.at += len(text)
        else:
            closing, text = yield from _closing_or_text(source, candidates)
            if closing is not None:
                return closing
        use(line_break + text)
        line_break, at_line = "", False


def _closing_or_text(source: TextSource, candidates: Sequence[Closing]) -> Script[tuple[Closing | None, str]]:
    """Decide whether a tag closes the value.

    Returns:
        The condition that closes the value and "". Or None and the text that was read, which belongs to the value.
    """
    first = candidates[0]
    if not first.is_read and not first.followed_by:
        return first, ""
    read = [first.tag]
    source.at += len(first.tag)
    if not first.followed_by:
        return first, ""
    while (yield from source.peek()) and (match := _SPACE.match(source.text, source.at)):
        read.append(match.group())
        source.at = match.end()
    if source.at == len(source.text) and source.over:
        ending = next((closing for closing in candidates if closing.ends_text), None)
        if ending is None:
            raise CutOff
        return ending, ""
    for closing in candidates:
        if (yield from source.find(sorted(closing.followed_by, key=len, reverse=True))):
            if not closing.is_read:
                source.unread("".join(read))
            return closing, ""
    return None, "".join(read)
