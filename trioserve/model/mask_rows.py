"""Token masks as arrays: masks of the rows that a step samples, and masks that are filled in advance."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.token_masks import BITS, TokenMasks, mask_words

__all__ = ["FilledMasks", "MaskArray", "MaskedRows", "allowed_tokens", "allows_more_than", "masked_rows"]

MaskArray = npt.NDArray[np.uint32]  # [rows, words per row]


class MaskedRows:
    """Copies of the filled masks of a step's sampled rows.

    Args:
        rows: indexes of the sampled rows that have a mask.
        bits: uint32 [len(rows), words].
        row_count: number of all sampled rows.

    Attributes:
        places: int32 [row_count], each row's index in bits, or -1 for a row without a mask. choose_tokens accepts
            places, and bits viewed as int32.
    """

    def __init__(self, rows: tuple[int, ...], bits: MaskArray, row_count: int) -> None:
        self.rows = rows
        self.bits = bits
        self.places = np.full(row_count, -1, dtype=np.int32)
        self.places[list(rows)] = np.arange(len(rows))

    def of(self, row: int) -> MaskArray | None:
        """Return the mask of a row, uint32 [words], or None.

        Args:
            row: index of the sampled row.
        """
        place = int(self.places[row])
        return None if place < 0 else self.bits[place]


def masked_rows(chunks: Sequence[ScheduledChunk], masks: TokenMasks | None, vocab_size: int) -> MaskedRows | None:
    """Wait until all masks of the rows are filled, and return them.

    Args:
        chunks: one for each sampled row, see sampled_rows.
        masks: masks of the plan.
        vocab_size: tokens in the vocabulary.

    Returns:
        Copies of the masks, or None if no row has a mask.
    """
    mask_rows = {row: chunk.mask_row for row, chunk in enumerate(chunks) if chunk.mask_row is not None}
    if not mask_rows:
        return None
    assert masks is not None, "a row refers to a mask, but the plan has none"
    words = mask_words(vocab_size)
    assert masks.words_per_row >= words, "masks of another vocabulary"
    masks.wait()
    memory = (ctypes.c_uint32 * (masks.row_count * masks.words_per_row)).from_address(masks.address)
    filled = np.ctypeslib.as_array(memory).reshape(masks.row_count, masks.words_per_row)
    return MaskedRows(tuple(mask_rows), filled[list(mask_rows.values()), :words], len(chunks))


def allowed_tokens(rows: MaskArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Unpack masks.

    Args:
        rows: uint32 [rows, words].
        vocab_size: tokens in the vocabulary.

    Returns:
        bool [rows, vocab_size], True if the token is allowed.
    """
    bits = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=-1, bitorder="little")
    return bits[:, :vocab_size].view(np.bool_)


def allows_more_than(row: MaskArray, tokens: Collection[int], vocab_size: int) -> bool:
    """Return True if a mask allows a token of the vocabulary that is not among some given tokens.

    Args:
        row: uint32 [words].
        tokens: token ids. Ids outside the vocabulary are ignored.
        vocab_size: tokens in the vocabulary.
    """
    allowed = allowed_tokens(row[None], vocab_size)[0]
    return int(allowed.sum()) > sum(bool(allowed[token]) for token in set(tokens) if 0 <= token < vocab_size)


class FilledMasks:
    """TokenMasks that are complete at once.

    Args:
        rows: for each mask the allowed tokens.
        vocab_size: tokens in the vocabulary.
    """

    def __init__(self, rows: Sequence[Collection[int]], vocab_size: int) -> None:
        self.row_count = len(rows)
        self.words_per_row = mask_words(vocab_size)
        allowed = np.zeros((len(rows), self.words_per_row * BITS), dtype=np.bool_)
        for row, tokens in enumerate(rows):
            allowed[row, list(tokens)] = True
        self.words: MaskArray = np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)
        self._filled = array.array("i", (1,))
        self.address = int(self.words.ctypes.data)
        self.filled_address = self._filled.buffer_info()[0]

    def wait(self) -> None:
        """Return at once, because the masks are filled."""
