"""A LoRA adapter as one rank of a group has it: what is added to the part of a matrix that the rank has."""

from __future__ import annotations

import numpy as np

from trioserve.model.adapter_weights import AdapterMatrix, AdapterWeights
from trioserve.model.number_formats import Values
from trioserve.model.parallel.cuts import Runs
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint

__all__ = ["rank_adapter"]


def rank_adapter(whole: AdapterWeights, checkpoint: RankCheckpoint) -> AdapterWeights:
    """Where a matrix has some of the outputs, so has b. Where it has some of the inputs, so has a, and what b makes of
    it is a part of the sum, as the matrix's own product is."""
    matrices: dict[str, AdapterMatrix] = {}
    for name, matrix in whole.matrices.items():
        cut = checkpoint.cut_of(f"{name}.weight")
        if cut is not None:
            matrices[name] = AdapterMatrix(_taken(matrix.a, cut.columns, 1), _taken(matrix.b, cut.rows, 0))
    return AdapterWeights(whole.digest, whole.dtype, matrices)


def _taken(values: Values, runs: Runs | None, axis: int) -> Values:
    if runs is None:
        return values
    places = np.concatenate([np.arange(first, first + count) for first, count in runs])
    return np.ascontiguousarray(np.take(values, places, axis=axis))
