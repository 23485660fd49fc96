"""Token masks as arrays: those of the rows that a step samples, and masks that are filled already."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.token_masks import BITS, TokenMasks, mask_words

__all__ = ["FilledMasks", "MaskArray", "MaskedRows", "allowed_tokens", "allows_more_than", "masked_rows"]

MaskArray = npt.NDArray[np.uint32]  # [rows, words of a row]


class MaskedRows:
    """The masks of some rows of a step that are sampled: copies, when they are filled.

    rows: which rows have one. bits: uint32 [as many, words]. places: int32 [rows of the step], each row's place in
    bits, below 0 where it has none. Both are what choose_tokens takes, once they are int32."""

    def __init__(self, rows: tuple[int, ...], bits: MaskArray, row_count: int) -> None:
        self.rows = rows
        self.bits = bits
        self.places = np.full(row_count, -1, dtype=np.int32)
        self.places[list(rows)] = np.arange(len(rows))

    def of(self, row: int) -> MaskArray | None:
        """uint32 [words]."""
        place = int(self.places[row])
        return None if place < 0 else self.bits[place]


def masked_rows(chunks: Sequence[ScheduledChunk], masks: TokenMasks | None, vocab_size: int) -> MaskedRows | None:
    """chunks: one for each row. None if no row has a mask; else waits until they are filled."""
    mask_rows = {row: chunk.mask_row for row, chunk in enumerate(chunks) if chunk.mask_row is not None}
    if not mask_rows:
        return None
    assert masks is not None, "a row with a mask in a plan without masks"
    words = mask_words(vocab_size)
    assert masks.words_per_row >= words, "masks of another vocabulary"
    masks.wait()
    memory = (ctypes.c_uint32 * (masks.row_count * masks.words_per_row)).from_address(masks.address)
    filled = np.ctypeslib.as_array(memory).reshape(masks.row_count, masks.words_per_row)
    return MaskedRows(tuple(mask_rows), filled[list(mask_rows.values()), :words], len(chunks))


def allowed_tokens(rows: MaskArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[rows, vocab_size]: whether each token may come."""
    bits = np.unpackbits(np.ascontiguousarray(rows).view(np.uint8), axis=-1, bitorder="little")
    return bits[:, :vocab_size].view(np.bool_)


def allows_more_than(row: MaskArray, tokens: Collection[int], vocab_size: int) -> bool:
    """Whether a row (uint32 [words]) has a bit in the vocabulary that stands for none of these tokens."""
    allowed = allowed_tokens(row[None], vocab_size)[0]
    return int(allowed.sum()) > sum(bool(allowed[token]) for token in set(tokens) if 0 <= token < vocab_size)


class FilledMasks:
    """TokenMasks that nobody has to wait for: each row is given as the tokens that may come."""

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
        """They are filled."""
