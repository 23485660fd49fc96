"""Prompt rows whose embeddings are given instead of looked up by token. Images reach the model this way."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["GivenRows", "rows_material"]


class GivenRows(msgspec.Struct, frozen=True):
    """Embeddings of the prompt positions start .. start + count - 1, regardless of the tokens at these positions.

    Attributes:
        start: First position.
        count: Number of positions.
        content: 16 bytes that identify the embeddings. Two contents are equal only if all numbers are equal, also
            across machines.
        values: Buffer of float32 [count, hidden_size]. Its numbers must not change. The buffer is kept as long as a
            request uses it.
    """

    start: int
    count: int
    content: bytes
    values: object

    @property
    def end(self) -> int:
        return self.start + self.count


def rows_material(given: Sequence[GivenRows], start: int, end: int) -> bytes:
    """Return the bytes that a block's hash depends on in addition to its tokens (contracts/block_hash.py).

    Args:
        given: Given rows, ordered by position.
        start: First position of the block.
        end: Position after the block.

    Returns:
        Bytes for with_material, or b"" if all embeddings of the block are looked up by token.
    """
    return b"".join(_overlaps(given, start, end))


def _overlaps(given: Iterable[GivenRows], start: int, end: int) -> Iterable[bytes]:
    for rows in given:
        if rows.start < end and rows.end > start:
            yield rows.content + struct.pack("<q", rows.start - start)
