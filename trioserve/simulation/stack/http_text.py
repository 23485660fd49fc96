"""Text of tokens that are bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["text_of"]


def text_of(tokens: Sequence[int], *, is_whole: bool) -> str:
    """Return the text of tokens. Half a character at the end is only shown if its rest will not come.

    Args:
        tokens: bytes of the text.
        is_whole: True if no more tokens come.
    """
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(tokens), is_whole)
