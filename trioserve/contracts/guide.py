"""Interfaces between the core and the code that restrains a sequence's tokens and fills its token masks.

In each step, the core asks a guide for its token masks (fill_masks), reports the sampled tokens (accept), and asks for
forced tokens (forced_tokens). A guide belongs to one sequence and to the core's thread. Only fill_masks runs in another
thread. From `MaskMaker.begin` until the masks are filled, the core makes no other call to that guide. Token masks are
bits in memory that native code and tensors can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

__all__ = ["BITS", "Guide", "GuidedRows", "MaskMaker", "TokenMasks", "mask_words"]


BITS = 32  # Each word of a mask has this number of bits.


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


class Guide(Protocol):
    """State of one sequence in its grammar. No method waits or raises."""

    @property
    def is_free_ahead(self) -> bool:
        """Return True if the grammar allows every token at the position after the next token, whatever the next token
        is.

        If so, the token after the next token can be sampled before accept is called for the next token. Until that
        call, the guide is one token behind.
        """
        ...

    @property
    def is_over(self) -> bool:
        """Return True if the grammar allows only tokens that end the sequence."""
        ...

    @property
    def fault(self) -> str | None:
        """Return why the sequence cannot continue, as a sentence for the client, or None if it can continue."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance the guide by one sampled token.

        Returns:
            False if the grammar does not allow the token. In that case `fault` then returns a reason.
        """
        ...

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next, whatever the model would choose.

        Does not advance the guide: the caller calls accept for each token that it uses.

        Args:
            count_max: Maximum number of tokens to return.
        """
        ...

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of `token_ids` that the grammar allows next. Does not advance the
        guide.

        Args:
            token_ids: Tokens in order, such as draft tokens.
        """
        ...

    def wants_mask(self, draft: Sequence[int]) -> bool:
        """Return True if the grammar restrains the next token, or a token that follows one of the draft tokens.

        Args:
            draft: Draft tokens after the last accepted token.
        """
        ...

    def fill_masks(self, address: int, words_per_row: int, draft: Sequence[int]) -> None:
        """Write the masks of the next token and of the token after each draft token. Does not advance the guide.

        Runs in a separate thread without a time limit. If a row cannot be filled, all of its bits stay 0.

        Args:
            address: Memory of the first row, see TokenMasks. The rows are consecutive.
            words_per_row: uint32 words in a row.
            draft: Draft tokens. Each draft token needs one more row, after the row of the next token.
        """
        ...


class GuidedRows(msgspec.Struct, frozen=True):
    """The mask rows of one guide in a step: 1 + len(draft) rows.

    Attributes:
        guide: Guide that fills the rows.
        row: Index of the first row.
        draft: Draft tokens of the sequence.
    """

    guide: Guide
    row: int
    draft: tuple[int, ...] = ()


class MaskMaker(Protocol):
    """Fills the token masks of one step after another."""

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        """Start to fill the masks of a step, and return at once.

        Args:
            guided: Guides and their rows, which cover all rows.
            row_count: Number of rows.
        """
        ...

    def end(self, masks: TokenMasks) -> None:
        """Release the masks of a step that has returned or was abandoned. The caller no longer reads the masks.

        If the masks are still being filled, their memory is kept until the filling is complete.

        Args:
            masks: Result of `begin`.
        """
        ...
