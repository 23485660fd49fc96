"""Rows of a step whose embeddings are given, such as rows of images, and these embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.contracts.step import ScheduledChunk
from trioserve.model.number_formats import Float32Array

__all__ = ["StepRows", "given_rows"]


class StepRows(NamedTuple):
    """Given embeddings of a step.

    Attributes:
        rows: int32 [n], row indexes in the step, ascending within a chunk.
        values: float32 [n, hidden_size], C-contiguous.
    """

    rows: npt.NDArray[np.int32]
    values: Float32Array


def given_rows(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], hidden_size: int) -> StepRows | None:
    """Collect the given embeddings of all chunks.

    Args:
        chunks: chunks of the step.
        first_rows: first row of each chunk in the step.
        hidden_size: numbers of one embedding.

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
            own = np.frombuffer(given.values, dtype=np.float32).reshape(given.count, hidden_size)  # type: ignore[call-overload]
            rows.append(np.arange(start, end, dtype=np.int32) - np.int32(chunk.start - first_row))
            values.append(own[start - given.start : end - given.start])
    if not rows:
        return None
    return StepRows(np.concatenate(rows), np.ascontiguousarray(np.concatenate(values)))
