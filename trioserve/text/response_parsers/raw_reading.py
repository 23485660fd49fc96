"""Reads a value that is any text up to a closing tag, and knows the tag from its like in the text by what follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from trioserve.text.response_parsers.text_source import CutOff, Script, TextSource

__all__ = ["Closing", "read_raw_value"]

_SPACE = re.compile(r"\s+")


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """tag: ends a value if one of `followed_by` comes next, white space aside, or anything if that is empty. at_line:
    only if it stands at the beginning of a line. is_read: it belongs to the value, and is read with it. ends_text: the
    end of the text may follow, too."""

    tag: str
    followed_by: Sequence[str] = ()
    at_line: bool = False
    is_read: bool = True
    ends_text: bool = False


def read_raw_value(
    source: TextSource, closings: Sequence[Closing], use: Callable[[str], None], *, trims_lines: bool
) -> Script[Closing]:
    """Read a value, handing its text to `use` as it comes, and the closing that it ends with. trims_lines: one line
    break at each end of the value belongs to the tags. Raises CutOff if the text ends before the value does."""
    tags = sorted({closing.tag for closing in closings}, key=len, reverse=True)
    plain = re.compile("[^\\n" + re.escape("".join(sorted({tag[0] for tag in tags}))) + "]+")
    line_break = ""  # held: it may be the one before the tag
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
    """At a tag: which closing it is; or the text that it is instead, which has been read."""
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
