"""Pooling of a prompt's hidden states into one vector. It uses only numpy, so every implementation of a model can call
it.
"""

from __future__ import annotations

import numpy as np

from trioserve.contracts.pooling import Pooling, PoolingResult
from trioserve.model.model_config import NormKind
from trioserve.model.number_formats import Float32Array

__all__ = ["needed_rows", "normed", "pooled_vector"]

LENGTH_MIN = 1e-12  # as in torch's normalize: a zero vector stays zero


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


def normed(kind: NormKind, rows: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """Return the RMS norm (arXiv 1910.07467) of each row, or its LayerNorm without a bias.

    Args:
        kind: "rms" or "layer".
        rows: float32 [n, size].
        weight: float32 [size].
        eps: added to the mean of squares.

    Returns:
        float32 [n, size].
    """
    if kind == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True, dtype=np.float32)
    scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    result: Float32Array = (rows / scale * weight).astype(np.float32, copy=False)
    return result
