"""A LoRA adapter (arXiv 2106.09685) in host memory: what is added to which of the model's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trioserve.model.number_formats import Dtype, Values

__all__ = ["AdapterMatrix", "AdapterWeights"]


class AdapterMatrix(NamedTuple):
    """a: [rank, inputs]. b: [outputs, rank], multiplied by the adapter's scale, its rows in the order of the model's
    matrix in here. A row x of a step gets b (a x) added to what the matrix makes of it."""

    a: Values
    b: Values


class AdapterWeights:
    """matrices: by the name of the model's matrix, such as layers.0.q_proj (see loading/names.py). digest: names the
    content."""

    def __init__(self, digest: str, dtype: Dtype, matrices: Mapping[str, AdapterMatrix]) -> None:
        self.digest = digest
        self.dtype: Dtype = dtype
        self.matrices = dict(matrices)

    @property
    def rank_max(self) -> int:
        """The largest of all matrices'."""
        return max(len(matrix.a) for matrix in self.matrices.values())

    @property
    def byte_count(self) -> int:
        return sum(part.nbytes for matrix in self.matrices.values() for part in matrix)
