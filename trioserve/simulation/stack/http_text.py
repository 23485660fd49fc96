"""What a client is shown of tokens that are bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["text_of"]


def text_of(tokens: Sequence[int], *, is_whole: bool) -> str:
    """Half a character at the end is shown only when it is known that the rest will not come."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(tokens), is_whole)
