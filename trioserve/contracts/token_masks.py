"""Token masks of one step, as bits in memory that native code and tensors can read."""

from __future__ import annotations

from typing import Protocol

__all__ = ["BITS", "TokenMasks", "mask_words"]

BITS = 32  # bits in a word


class TokenMasks(Protocol):
    """One bit for each token of the vocabulary, in each restrained row of a step.

    A thread without the GIL may still fill the masks while the step is computed. The sampler waits until that thread is
    done.

    Attributes:
        row_count: Number of rows.
        words_per_row: uint32 words in a row.
        address: Address of uint32 [row_count, words_per_row], contiguous. Token i of a row is allowed if bit i % 32 of
            word i // 32 is set. Bits above the vocabulary are 0. If all bits of a row are 0, the row could not be
            filled, and its request must fail. The address is valid while this object exists.
        filled_address: Address of one C int: 0 until all rows are filled, then 1. The address is valid while this
            object exists.
    """

    row_count: int
    words_per_row: int
    address: int
    filled_address: int

    def wait(self) -> None:
        """Block the calling thread until all rows are filled."""
        ...


def mask_words(vocab_size: int) -> int:
    """Return the number of words in a row.

    Args:
        vocab_size: Tokens in the vocabulary.
    """
    return (vocab_size + BITS - 1) // BITS
