"""How alike vectors are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trioserve.contracts.pooling import Pooled

__all__ = ["cosines"]


def cosines(left: Sequence[Pooled], right: Sequence[Pooled]) -> list[float]:
    """Of vectors of length 1: of each on the right with its own on the left, or with the only one there."""
    products = _rows(left).astype(np.float64) * _rows(right).astype(np.float64)
    found: list[float] = np.clip(products.sum(axis=1), -1.0, 1.0).tolist()
    return found


def _rows(vectors: Sequence[Pooled]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.frombuffer(b"".join(vector.data for vector in vectors), dtype="<f4").reshape(len(vectors), -1)
