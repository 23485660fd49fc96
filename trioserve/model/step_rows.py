"""Rows of a step as arrays: rows with given embeddings, rows with token masks, and rows that are pooled.

The module uses only numpy, so every implementation of a model can call its functions.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.contracts.guide import BITS, TokenMasks, mask_words
from trioserve.contracts.pooling import Pooling, PoolingResult
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.layer_config import NormKind
from trioserve.model.number_formats import Float32Array

__all__ = [
    "StepRows",
    "given_rows",
    "rotary_positions",
    "row_ends",
    "FilledMasks",
    "MaskArray",
    "MaskedRows",
    "allowed_tokens",
    "allows_more_than",
    "masked_rows",
    "needed_rows",
    "normed",
    "pooled_vector",
    "token_results",
]


class StepRows(NamedTuple):
    """Rows of a step whose embeddings are given, such as embeddings of images.

    Attributes:
        rows: int32 [n], row indexes in the step, ascending within a chunk.
        values: float32 [n, width], C-contiguous. The first hidden_size numbers replace the embedding. Each further
            hidden_size numbers are added to the output of a layer, in the order of the layers (DeepStack, arXiv
            2406.04334).
    """

    rows: npt.NDArray[np.int32]
    values: Float32Array


def given_rows(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int]) -> StepRows | None:
    """Collect the given embeddings of all chunks.

    Args:
        chunks: chunks of the step.
        first_rows: first row of each chunk in the step.

    Returns:
        The given rows, or None if every row uses the embedding of its token.
    """
    rows: list[npt.NDArray[np.int32]] = []
    values: list[Float32Array] = []
    for chunk, first_row in zip(chunks, first_rows, strict=True):
        for given in chunk.request.given:
            start, end = max(given.start, chunk.start), min(given.end, chunk.start + chunk.row_count)
            if start >= end:
                continue
            # mypy does not know that the values have a buffer.
            own = np.frombuffer(given.values, dtype=np.float32).reshape(given.count, -1)  # type: ignore[call-overload]
            rows.append(np.arange(start, end, dtype=np.int32) - np.int32(chunk.start - first_row))
            values.append(own[start - given.start : end - given.start])
    if not rows:
        return None
    return StepRows(np.concatenate(rows), np.ascontiguousarray(np.concatenate(values)))


def rotary_positions(chunk: ScheduledChunk) -> npt.NDArray[np.int64]:
    """Return the positions that rotate the rows of a chunk.

    An image with a grid (GivenRows.grid) begins at the next position, as any token would. Its token at row r and column
    c adds r to the second and c to the third position (M-RoPE, arXiv 2409.12191). The next token has the position after
    the largest of the image's positions.

    Args:
        chunk: the chunk. All its rows count, known tokens and draft tokens.

    Returns:
        int64 [rows], or [3, rows] if a row belongs to an image with a grid: positions in time, row and column.
    """
    end = chunk.start + chunk.row_count
    positions = np.arange(chunk.start, end, dtype=np.int64)
    inside: list[tuple[slice, npt.NDArray[np.int64]]] = []
    for given in chunk.request.given:
        if given.grid is None or given.start >= end:
            continue
        first, last = max(given.start, chunk.start), min(given.end, end)
        if first < last:
            places = np.arange(first - given.start, last - given.start)
            rows_columns = np.stack((np.zeros_like(places), *np.divmod(places, given.grid[1])))
            begin = given.start + (positions[first - chunk.start] - first)
            inside.append((slice(first - chunk.start, last - chunk.start), begin + rows_columns))
        positions[max(last - chunk.start, 0) :] -= given.count - given.rotary_count
    if not inside:
        return positions
    positions = np.tile(positions, (3, 1))
    for rows, own in inside:
        positions[:, rows] = own
    return positions


def row_ends(chunk: ScheduledChunk) -> npt.NDArray[np.int32] | None:
    """Return the position after the last token that each row of a chunk attends to.

    Args:
        chunk: a chunk that contains every later row of a bidirectional span of which it contains a row.

    Returns:
        int32 [row_count], never decreasing. None if each row attends up to its own token.
    """
    end = chunk.start + chunk.row_count
    joint = [
        rows for rows in chunk.request.given if rows.is_bidirectional and rows.start < end and rows.end > chunk.start
    ]
    if not joint:
        return None
    ends = np.arange(chunk.start + 1, end + 1, dtype=np.int32)
    for rows in joint:
        assert rows.end <= end, f"{chunk.request.id}: a chunk ends inside an image"
        ends[max(rows.start - chunk.start, 0) : rows.end - chunk.start] = rows.end
    return ends


MaskArray = npt.NDArray[np.uint32]  # shape [rows, words per row]


class MaskedRows:
    """Copies of the token masks of a step's sampled rows.

    Args:
        rows: indexes of the sampled rows that have a mask.
        bits: uint32 [len(rows), words].
        row_count: number of all sampled rows.

    Attributes:
        places: int32 [row_count], each row's index in `bits`, or -1 for a row without a mask. choose_tokens accepts
            `places`, and `bits` as an int32 view.
    """

    def __init__(self, rows: tuple[int, ...], bits: MaskArray, row_count: int) -> None:
        self.rows = rows
        self.bits = bits
        self.places = np.full(row_count, -1, dtype=np.int32)
        self.places[list(rows)] = np.arange(len(rows))

    def of(self, row: int) -> MaskArray | None:
        """Return the mask of a row, uint32 [words], or None for a row without a mask.

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
    """Return True if a mask allows at least one token of the vocabulary besides the given tokens.

    Args:
        row: uint32 [words].
        tokens: token ids. Ids outside the vocabulary are ignored.
        vocab_size: tokens in the vocabulary.
    """
    allowed = allowed_tokens(row[None], vocab_size)[0]
    return int(allowed.sum()) > sum(bool(allowed[token]) for token in set(tokens) if 0 <= token < vocab_size)


class FilledMasks:
    """TokenMasks that are complete when they are created.

    Args:
        rows: allowed tokens of each mask.
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
        """Return immediately, because the masks are complete."""


LENGTH_MIN = 1e-12  # With this minimum, a zero vector stays zero, as in torch's normalize.


def needed_rows(pooling: Pooling) -> slice:
    """Return the rows of a prompt's last chunk that pooled_vector needs.

    Args:
        pooling: the request's pooling parameters.
    """
    return {"last": slice(-1, None), "cls": slice(0, 1), "mean": slice(None)}[pooling.method]


def pooled_vector(rows: Float32Array, pooling: Pooling) -> PoolingResult | None:
    """Pool rows into one vector.

    Args:
        rows: float32 [n, size], the needed_rows after the model's last norm.
        pooling: the request's pooling parameters.

    Returns:
        The vector, or None if it has NaN or infinity.
    """
    vector = rows.mean(axis=0, dtype=np.float64) if pooling.method == "mean" else rows[0].astype(np.float64)
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), LENGTH_MIN)
    if not np.isfinite(vector).all():
        return None
    return PoolingResult(vector.astype("<f4").tobytes())


def token_results(rows: Float32Array, pooling: Pooling) -> PoolingResult | None:
    """Return a result with one row for each token.

    Args:
        rows: float32 [tokens, size], vectors or probabilities of labels.
        pooling: the request's pooling parameters. Only vectors are shortened and normalized.

    Returns:
        The result, or None if it has NaN or infinity.
    """
    if pooling.task == "token_embed":
        rows = rows[:, : pooling.dimensions]
        if pooling.normalize:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), LENGTH_MIN)
    if not np.isfinite(rows).all():
        return None
    return PoolingResult(rows.astype("<f4").tobytes(), row_size=rows.shape[1])


def normed(kind: NormKind, rows: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """Return the RMS norm (arXiv 1910.07467) of each row, or its LayerNorm.

    Args:
        kind: type of norm, see ModelConfig.
        rows: float32 [n, size].
        weight: float32 [size], or [2 * size] with weights and biases of "layer_biased".
        eps: added to the mean of squares.

    Returns:
        float32 [n, size].
    """
    if kind != "rms":
        rows = rows - rows.mean(axis=-1, keepdims=True, dtype=np.float32)
    scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    weights, *biases = weight.reshape(-1, rows.shape[1])
    result: Float32Array = sum(biases, start=rows / scale * weights).astype(np.float32, copy=False)
    return result
