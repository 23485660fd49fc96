"""Hidden states of a prompt to the vector that it becomes. Knows numpy only: whoever computes the hidden states."""

from __future__ import annotations

import numpy as np

from trioserve.contracts.pooling import Pooled, Pooling
from trioserve.model.model_config import NormKind
from trioserve.model.number_formats import Float32Array

__all__ = ["needed_rows", "normed", "pooled_vector"]

LENGTH_MIN = 1e-12  # as torch's normalize: a vector of zeros stays one


def needed_rows(pooling: Pooling) -> slice:
    """Which rows of a prompt's last chunk pooled_vector is to be given."""
    return {"last": slice(-1, None), "cls": slice(0, 1), "mean": slice(None)}[pooling.method]


def pooled_vector(rows: Float32Array, pooling: Pooling) -> Pooled | None:
    """rows: [n, size], the needed_rows after the model's last norm. None: a number of it is not finite."""
    vector = rows.mean(axis=0, dtype=np.float64) if pooling.method == "mean" else rows[0].astype(np.float64)
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), LENGTH_MIN)
    if not np.isfinite(vector).all():
        return None
    return Pooled(vector.astype("<f4").tobytes())


def normed(kind: NormKind, rows: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """RMS norm (arXiv 1910.07467), or LayerNorm without a bias. rows: [n, size]; weight: [size]."""
    if kind == "layer":
        rows = rows - rows.mean(axis=-1, keepdims=True, dtype=np.float32)
    scale = np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))
    result: Float32Array = (rows / scale * weight).astype(np.float32, copy=False)
    return result
