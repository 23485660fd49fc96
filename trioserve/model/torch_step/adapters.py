"""LoRA adapters in torch: the rows of a step that use adapters, for steps of any shape and for steps of fixed shape.

In a step of any shape, each adapter multiplies its own rows. This is the reference. A recorded step cannot do this,
because the number of an adapter's rows differs from step to step. There, the factors of several adapters are stacked
into one matrix with a fixed number of columns. An adapter of rank r has r adjacent columns. All rows are multiplied
with all columns, and a row's products with columns of other adapters become 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.weights import AdapterId
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.torch_step.formats import Sending, as_tensor
from trioserve_kernels import Kernels

__all__ = ["NO_ADAPTER", "AdaptedLinear", "AdapterColumns", "AdapterRows", "TorchAdapter", "adapter_rows"]


@dataclass(frozen=True, slots=True)
class TorchAdapter:
    """Matrices of one adapter on a device.

    Attributes:
        rank_max: see AdapterWeights.
        matrices: a [rank, inputs] and b [outputs, rank] by the name of the model's matrix, such as layers.0.q_proj.
    """

    rank_max: int
    matrices: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, weights: AdapterWeights, device: torch.device) -> TorchAdapter:
        matrices = {
            name: (as_tensor(matrix.a).to(device), as_tensor(matrix.b).to(device))
            for name, matrix in weights.matrices.items()
        }
        return cls(weights.rank_max, matrices)


class AdapterRows(Protocol):
    """Rows of a step that use adapters."""

    def add_(self, product: Tensor, values: Tensor, outputs: Mapping[str, int]) -> None:
        """Add each adapter's product for its rows.

        Args:
            product: [T, sum of outputs], changed in place.
            values: [T, inputs].
            outputs: number of outputs of each matrix, by name. `product` contains the matrices' products in this order.
        """
        ...


@dataclass(frozen=True, slots=True)
class _IndexedRows:
    """Rows of a step of any shape.

    Attributes:
        groups: each adapter, and the indexes of its rows, int64 [n] on the step's device.
    """

    groups: tuple[tuple[TorchAdapter, Tensor], ...]
    kernels: Kernels

    def add_(self, product: Tensor, values: Tensor, outputs: Mapping[str, int]) -> None:
        for adapter, rows in self.groups:
            first = 0
            for name, size in outputs.items():
                if name in adapter.matrices:
                    part = product[:, first : first + size]
                    part.index_add_(0, rows, self._low_rank(values.index_select(0, rows), *adapter.matrices[name]))
                first += size

    def _low_rank(self, values: Tensor, a: Tensor, b: Tensor) -> Tensor:
        linear = self.kernels.linear
        return linear(linear(values, a, None, functional.linear), b, None, functional.linear)


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
        sending: transfer to which row indexes are added. The result's tensors are defined after `sending.send`.

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
    return _IndexedRows(groups, kernels)


NO_ADAPTER, FREE_COLUMN = 0, -1  # An AdapterId is 1 or more.


class AdaptedLinear(Protocol):
    """A linear layer of the model whose matrices may have adapters."""

    @property
    def inputs(self) -> int: ...
    @property
    def parts(self) -> Mapping[str, int]:
        """Number of outputs of each matrix, by name."""
        ...


class _Columns:
    """Stacked factors of the matrices of one linear layer.

    Attributes:
        a: [matrices, columns, inputs].
        b: [outputs, columns] of each matrix.
    """

    def __init__(self, linear: AdaptedLinear, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._names = tuple(linear.parts)
        self.a = torch.zeros(len(self._names), count, linear.inputs, dtype=dtype, device=device)
        self.b = [torch.zeros(size, count, dtype=dtype, device=device) for size in linear.parts.values()]

    def write(self, adapter: TorchAdapter, columns: slice) -> None:
        """Write an adapter's factors. Columns after the rank of a matrix get zeros in a, so their b has no effect."""
        for index, name in enumerate(self._names):
            a = self.a[index, columns]
            if name not in adapter.matrices:
                a.zero_()
                continue
            given_a, given_b = adapter.matrices[name]
            rank = len(given_a)
            a[:rank].copy_(given_a)
            a[rank:].zero_()
            self.b[index][:, columns.start : columns.start + rank].copy_(given_b)


@dataclass(frozen=True, slots=True)
class _MaskedRows:
    """Rows of a step of fixed shape.

    Attributes:
        layers: stacked factors of each linear layer, by the name of its first matrix.
        is_foreign: bool [T, 1, columns], True if the column does not belong to the row's adapter.
    """

    layers: Mapping[str, _Columns]
    is_foreign: Tensor

    def add_(self, product: Tensor, values: Tensor, outputs: Mapping[str, int]) -> None:
        layer = self.layers.get(next(iter(outputs)))
        if layer is None:
            return
        low = functional.linear(values, layer.a.flatten(0, 1)).view(len(values), *layer.a.shape[:2])
        # Not a product with 0 or 1: another adapter's number may be infinite, and 0 times infinity is NaN.
        low.masked_fill_(self.is_foreign, 0.0)
        first = 0
        for index, b in enumerate(layer.b):
            product[:, first : first + len(b)].addmm_(low[:, index], b.t())
            first += len(b)


class AdapterColumns:
    """Adapters in tensors with fixed addresses and shapes.

    An adapter is written when a step needs it. If there is no room, the adapters that were unused for the longest time
    lose their columns. The device executes these copies between two steps, in the order of the calls.

    Args:
        linears: linear layers whose matrices may have adapters.
        loaded: all adapters by number. The caller may change the mapping.
        count: number of columns, the largest sum of ranks of the adapters in one step.
        dtype: number format of adapters and model.
        device: device of the tensors.
    """

    def __init__(
        self,
        linears: Iterable[AdaptedLinear],
        loaded: Mapping[AdapterId, TorchAdapter],
        count: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._loaded = loaded
        self._count = count
        self._layers = {next(iter(linear.parts)): _Columns(linear, count, dtype, device) for linear in linears}
        self._owners = torch.full((count,), FREE_COLUMN, dtype=torch.int32, device=device)
        self._runs: dict[AdapterId, slice] = {}  # The adapter that was unused for the longest time comes first.

    def place(self, ids: Collection[AdapterId]) -> bool:
        """Give columns to all adapters of a step.

        Args:
            ids: numbers of loaded adapters.

        Returns:
            False if the adapters have more columns together than there are.
        """
        ranks = {id: self._loaded[id].rank_max for id in ids}
        if sum(ranks.values()) > self._count:
            return False
        for id in ids:
            if id in self._runs:
                self._runs[id] = self._runs.pop(id)
        missing = [id for id in ids if id not in self._runs]
        while missing:
            first = self._free_run(ranks[missing[-1]], ids)
            if first is None:  # Columns of this step's adapters lie between the free ones.
                for id in [*self._runs]:
                    self.forget(id)
                missing = [*ids]
            else:
                self._write(missing.pop(), first)
        return True

    def forget(self, id: AdapterId) -> None:
        """Take the columns of an adapter away. Do nothing if it has none.

        Args:
            id: number of the adapter.
        """
        if (columns := self._runs.pop(id, None)) is not None:
            self._owners[columns].fill_(FREE_COLUMN)

    def rows(self, numbers: Tensor) -> AdapterRows:
        """Return the rows of a step.

        Args:
            numbers: int32 [T], number of each row's adapter, or NO_ADAPTER.
        """
        return _MaskedRows(self._layers, (numbers[:, None] != self._owners)[:, None])

    def _free_run(self, rank: int, needed: Collection[AdapterId]) -> int | None:
        """Return the first of `rank` adjacent free columns. Adapters that are not needed may lose their columns."""
        idle = [id for id in self._runs if id not in needed]
        while True:
            first = 0
            for columns in sorted(self._runs.values(), key=lambda columns: columns.start):
                if columns.start - first >= rank:
                    return first
                first = columns.stop
            if self._count - first >= rank:
                return first
            if not idle:
                return None
            self.forget(idle.pop(0))

    def _write(self, id: AdapterId, first: int) -> None:
        adapter = self._loaded[id]
        columns = slice(first, first + adapter.rank_max)
        for layer in self._layers.values():
            layer.write(adapter, columns)
        self._owners[columns].fill_(id)
        self._runs[id] = columns
