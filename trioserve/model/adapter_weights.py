"""Weights of a LoRA adapter (arXiv 2106.09685) in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trioserve.model.number_formats import Dtype, Values

__all__ = ["AdapterMatrix", "AdapterWeights"]


class AdapterMatrix(NamedTuple):
    """Low-rank change of one matrix of the model. For an input row x, b (a x) is added to the matrix's result.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], already multiplied by the adapter's scale. Its rows are in the order of the rows of the
            loaded matrix.
    """

    a: Values
    b: Values


class AdapterWeights:
    """All matrices of one adapter.

    Args:
        digest: hash that names the content.
        dtype: number format of the matrices.
        matrices: low-rank matrices by the name of the model's matrix, such as layers.0.q_proj (see loading/names.py).
        rank_max: largest rank of all matrices of the adapter. None: `matrices` has all of them.

    Attributes:
        rank_max: see above. Equal in all processes that compute parts of one model.
    """

    def __init__(
        self, digest: str, dtype: Dtype, matrices: Mapping[str, AdapterMatrix], rank_max: int | None = None
    ) -> None:
        self.digest = digest
        self.dtype: Dtype = dtype
        self.matrices = dict(matrices)
        self.rank_max = max(len(matrix.a) for matrix in matrices.values()) if rank_max is None else rank_max

    @property
    def byte_count(self) -> int:
        return sum(part.nbytes for matrix in self.matrices.values() for part in matrix)
