"""Of a step's chunks, the rows whose embeddings are given, and these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.contracts.step import ScheduledChunk
from trioserve.model.number_formats import Float32Array

__all__ = ["StepRows", "given_rows"]


class StepRows(NamedTuple):
    """rows: int32 [n], ascending within a chunk. values: float32 [n, hidden_size], C-contiguous."""

    rows: npt.NDArray[np.int32]
    values: Float32Array


def given_rows(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], hidden_size: int) -> StepRows | None:
    """first_rows: for each chunk, its first row in the step. None: every row's embedding is that of its token."""
    rows: list[npt.NDArray[np.int32]] = []
    values: list[Float32Array] = []
    for chunk, first_row in zip(chunks, first_rows, strict=True):
        for given in chunk.request.given:
            start, end = max(given.start, chunk.start), min(given.end, chunk.start + chunk.row_count)
            if start >= end:
                continue
            own = np.frombuffer(given.values, dtype=np.float32).reshape(given.count, hidden_size)  # type: ignore[call-overload]  # it has a buffer
            rows.append(np.arange(start, end, dtype=np.int32) - np.int32(chunk.start - first_row))
            values.append(own[start - given.start : end - given.start])
    if not rows:
        return None
    return StepRows(np.concatenate(rows), np.ascontiguousarray(np.concatenate(values)))
