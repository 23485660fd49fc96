"""Which tokens may come next in the rows of one step that are not free: bits in memory that C and tensors can read."""

from __future__ import annotations

from typing import Protocol

__all__ = ["BITS", "TokenMasks", "mask_words"]

BITS = 32  # of a word


class TokenMasks(Protocol):
    """A bit for each token of the vocabulary, for each row. They may still be filled, in a thread without the GIL,
    while the step that uses them is computed; whoever chooses tokens waits for that.

    address: of uint32 [row_count, words_per_row], contiguous: token i of a row may come if bit i % 32 of its word
    i // 32 is set. Bits beyond the vocabulary are not set. A row without any bit is one that could not be filled: its
    request cannot go on. filled_address: of one C int, which is 0 until all rows are filled, and then 1. Both are good
    as long as this object.
    """

    row_count: int
    words_per_row: int
    address: int
    filled_address: int

    def wait(self) -> None:
        """Returns when all rows are filled. Blocks the calling thread."""
        ...


def mask_words(vocab_size: int) -> int:
    """Words of a row."""
    return (vocab_size + BITS - 1) // BITS
