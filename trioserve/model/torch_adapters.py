"""LoRA adapters as tensors, and the rows of a step that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.torch_formats import Sending, as_tensor
from trioserve.model.weights import AdapterWeights
from trioserve_kernels import Kernels

__all__ = ["AdapterRows", "TorchAdapter", "adapter_rows", "torch_adapter"]

TorchAdapter = Mapping[str, tuple[Tensor, Tensor]]
"""Matrices a [rank, inputs] and b [outputs, rank] by the name of the model's matrix, such as layers.0.q_proj."""


def torch_adapter(weights: AdapterWeights, device: torch.device) -> TorchAdapter:
    return {
        name: (as_tensor(matrix.a).to(device), as_tensor(matrix.b).to(device))
        for name, matrix in weights.matrices.items()
    }


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of a step that use adapters.

    Attributes:
        groups: each adapter with its rows, int64 [n] on the step's device.
    """

    groups: tuple[tuple[TorchAdapter, Tensor], ...]
    kernels: Kernels

    def add_(self, product: Tensor, values: Tensor, outputs: Mapping[str, int]) -> None:
        """Add each adapter's product for its rows.

        Args:
            product: [T, sum of outputs], changed in place.
            values: [T, inputs].
            outputs: output count of each matrix, by name. The matrices' products lie side by side in this order.
        """
        for adapter, rows in self.groups:
            first = 0
            for name, size in outputs.items():
                if name in adapter:
                    part = product[:, first : first + size]
                    part.index_add_(0, rows, self._low_rank(values.index_select(0, rows), *adapter[name]))
                first += size

    def _low_rank(self, values: Tensor, a: Tensor, b: Tensor) -> Tensor:
        linear = self.kernels.linear
        product = torch.nn.functional.linear
        return linear(linear(values, a, None, product), b, None, product)


def adapter_rows(
    chunks: Sequence[ScheduledChunk],
    first_rows: Sequence[int],
    adapters: Mapping[AdapterId, TorchAdapter],
    kernels: Kernels,
    sending: Sending,
) -> AdapterRows | None:
    """Find the rows of a step that use adapters.

    Args:
        chunks: chunks of the step.
        first_rows: first row of each chunk.
        adapters: loaded adapters.
        kernels: kernels that multiply.
        sending: transfer to which row indexes are added. They are defined after `sending.send`.

    Returns:
        The rows by adapter, or None if no chunk has an adapter.
    """
    rows: dict[AdapterId, list[int]] = {}
    for chunk, first in zip(chunks, first_rows, strict=True):
        if chunk.request.adapter is not None:
            rows.setdefault(chunk.request.adapter.id, []).extend(range(first, first + chunk.row_count))
    if not rows:
        return None
    groups = tuple((adapters[id], sending.add(np.array(found, dtype=np.int64))) for id, found in rows.items())
    return AdapterRows(groups, kernels)
