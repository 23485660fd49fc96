"""Rows of a prompt whose embeddings are given instead of looked up by their tokens: what an image is to a model."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["GivenRows", "rows_material"]


class GivenRows(msgspec.Struct, frozen=True):
    """The embeddings of the prompt's positions start .. start + count - 1, whatever tokens stand there.

    content: names them: equal for equal numbers alone, on every machine; 16 bytes. values: float32 [count,
    hidden_size], whatever has a buffer, not to be changed; it is kept as long as a request has it.
    """

    start: int
    count: int
    content: bytes
    values: object

    @property
    def end(self) -> int:
        return self.start + self.count


def rows_material(given: Sequence[GivenRows], start: int, end: int) -> bytes:
    """What a block of the positions start .. end - 1 is named by besides its tokens (contracts/block_hash.py); empty
    where all its embeddings are those of its tokens. given: in the order of their positions."""
    return b"".join(_places(given, start, end))


def _places(given: Iterable[GivenRows], start: int, end: int) -> Iterable[bytes]:
    for rows in given:
        if rows.start < end and rows.end > start:
            yield rows.content + struct.pack("<q", rows.start - start)
