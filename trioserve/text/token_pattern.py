"""Finds and replaces control tokens in texts of any length."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator

__all__ = ["TokenPattern", "in_slices"]

SLICE_CHARACTERS = 65_536  # searched in one call of at most 3 ms; other threads can run between two calls


class TokenPattern:
    """Searches texts for tokens.

    The first token in the text is found first. If several tokens begin at the same character, the longest one is found.
    The search continues after it.

    Args:
        tokens: The tokens, none empty.

    Cost: 1 to 50 ns per character, however many tokens there are.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._length_max = max(map(len, tokens), default=0)
        self._pattern: re.Pattern[str] | None = None
        try:
            self._pattern = re.compile(_alternatives(set(tokens))) if tokens else None
        except (RecursionError, re.error):  # thousands of tokens, each a prefix of the next
            self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Iterate over the tokens in a text, in order.

        Args:
            text: The text.
        """
        begin = 0
        while self._pattern is not None and begin < len(text):
            end = begin + SLICE_CHARACTERS
            begin = end
            for found in self._pattern.finditer(text, end - SLICE_CHARACTERS, end + self._length_max - 1):
                if found.start() >= end:
                    break
                yield found
                begin = max(end, found.end())

    def tokens_in(self, text: str) -> list[str]:
        return [found[0] for found in self.find(text)]

    def replaced(self, text: str, replacement: Callable[[str], str]) -> str:
        """Return a text with each token replaced.

        Args:
            text: The text.
            replacement: Returns the new text for a token.
        """
        pieces: list[str] = []
        end = 0
        for found in self.find(text):
            pieces += (text[end : found.start()], replacement(found[0]))
            end = found.end()
        return "".join((*pieces, text[end:])) if pieces else text


def in_slices(text: str) -> Iterator[str]:
    """Iterate over a text in slices of SLICE_CHARACTERS characters.

    Args:
        text: The text.
    """
    for begin in range(0, len(text), SLICE_CHARACTERS):
        yield text[begin : begin + SLICE_CHARACTERS]


def _alternatives(words: set[str]) -> str:
    """Return a pattern that matches any of the words and reads common prefixes once.

    Thousands of words may begin with `<`.
    """
    begin = os.path.commonprefix(list(words))  # noqa: RUF071 # the common prefix of texts, not of paths
    rests = {word[len(begin) :] for word in words}
    by_letter: dict[str, set[str]] = {}
    for rest in rests - {""}:
        by_letter.setdefault(rest[0], set()).add(rest)
    branches = "|".join(_alternatives(by_letter[letter]) for letter in sorted(by_letter))
    if not branches:
        return re.escape(begin)
    return f"{re.escape(begin)}(?:{branches}){'?' if '' in rests else ''}"
