"""Stores LoRA adapters for the native kernels. The order in memory is the order in which a step reads the weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig
from trioserve.model.loading.stored_tensor import AdapterMatrix, AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.packed_weights import has_pairs_together, pairs_together
from trioserve.model.number_formats import VALUE_BYTES, Dtype, empty_values
from trioserve_kernels.native import CACHE_LINE_BYTES, Library, WeightMemory, address
from trioserve_kernels.structs import BLOCK_OUTPUTS, AdapterLayerStruct, AdapterMatrixStruct, AdapterPartStruct

__all__ = ["NativeAdapter"]


class _Part(NamedTuple):
    """Position of one module's outputs among the outputs of a product. The model's matrix has the same positions.

    Attributes:
        pairs_of: size of heads whose halves alternate, see pairs_together. 0: outputs keep their order.
    """

    module: str
    outputs: int
    first_block: int
    block_step: int = 1
    pairs_of: int = 0


def _products(layer: LayerConfig, hidden: int) -> Iterator[tuple[str, int, tuple[_Part, ...]]]:
    """Yield name, inputs and parts of each product that may have an adapter, in the order of their computation."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, AttentionConfig):
        queries, keys = attention.query_size, attention.key_size
        pairs_of = attention.head_dim if has_pairs_together(attention) else 0
        query_blocks, key_blocks = queries // BLOCK_OUTPUTS, keys // BLOCK_OUTPUTS
        own = (
            _Part("k_proj", keys, query_blocks, pairs_of=pairs_of),
            _Part("v_proj", attention.value_size, query_blocks + key_blocks),
        )
        shared = attention.kv_from is not None
        yield "qkv", hidden, (_Part("q_proj", queries, 0, pairs_of=pairs_of), *(() if shared else own))
        yield "output", attention.attended_size, (_Part("o_proj", hidden, 0),)
    if isinstance(mlp, MlpConfig):
        middle = mlp.intermediate_size
        # Blocks of gate and up alternate, as in the model's matrix.
        alternating = (_Part("gate_proj", middle, 0, 2), _Part("up_proj", middle, 1, 2))
        yield "gate_up", hidden, alternating if mlp.has_gate else (_Part("up_proj", middle, 0),)
        yield "down", middle, (_Part("down_proj", hidden, 0),)


class NativeAdapter:
    """One adapter in native memory. The owner closes the adapter when no step uses it.

    Args:
        weights: matrices in the model's dtype.
        config: model.
        library: compiled kernels.
        dtype: number format of the model.

    Raises:
        MemoryError: present is not enough memory.
    """

    def __init__(self, weights: AdapterWeights, config: ModelConfig, library: Library, dtype: Dtype) -> None:
        assert weights.dtype == dtype, "an adapter in another dtype than its model"
        self._library = library
        self._dtype: Dtype = dtype
        self._layers = (AdapterLayerStruct * config.layer_count)()
        places = [
            (index, name, inputs, parts)
            for index, layer in enumerate(config.layers)
            for name, inputs, parts in _products(layer, config.hidden_size)
        ]
        found = [
            [(part, weights.matrices.get(f"layers.{index}.{part.module}")) for part in parts]
            for index, _, _, parts in places
        ]
        present = [
            [(part, matrix) for part, matrix in parts_of_product if matrix is not None] for parts_of_product in found
        ]
        byte_count = sum(self._bytes(inputs, parts) for (_, _, inputs, _), parts in zip(places, present, strict=True))
        self._memory = WeightMemory(library, max(1, byte_count))  # A stage may have no matrices.
        for (index, name, inputs, _), parts in zip(places, present, strict=True):
            if parts:
                setattr(self._layers[index], name, self._matrix(inputs, parts))

    @property
    def layers(self) -> int:
        """Address of the adapter's description. A step of the native kernels reads the description."""
        return ctypes.addressof(self._layers)

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        self._memory.close()

    def _bytes(self, inputs: int, parts: Sequence[tuple[_Part, AdapterMatrix]]) -> int:
        a = sum(self._library.packed_bytes(matrix.a.shape[0], inputs, self._dtype) for _, matrix in parts)
        return a + sum(self._b_bytes(part, matrix) for part, matrix in parts)

    def _b_bytes(self, part: _Part, matrix: AdapterMatrix) -> int:
        size = part.outputs * self._rank(matrix) * VALUE_BYTES[self._dtype]
        return -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES

    def _rank(self, matrix: AdapterMatrix) -> int:
        """Return the rank, rounded up so that a row of the adapter is a multiple of four bytes, as kernels need."""
        unit = 4 // VALUE_BYTES[self._dtype]
        return -(-len(matrix.a) // unit) * unit

    def _matrix(self, inputs: int, parts: Sequence[tuple[_Part, AdapterMatrix]]) -> AdapterMatrixStruct:
        struct = AdapterMatrixStruct()
        sizes = [self._library.packed_bytes(matrix.a.shape[0], inputs, self._dtype) for _, matrix in parts]
        a = struct.a = self._memory.take(sum(sizes))
        first = 0
        for place, ((part, matrix), size) in enumerate(zip(parts, sizes, strict=True)):
            self._library.pack(np.ascontiguousarray(matrix.a), a)
            a += size
            b = self._blocks(part, matrix)
            start = self._memory.take(self._b_bytes(part, matrix))
            ctypes.memmove(start, address(b), b.nbytes)
            struct.parts[place] = AdapterPartStruct(
                b=start,
                first_block=part.first_block,
                block_step=part.block_step,
                block_count=part.outputs // BLOCK_OUTPUTS,
                rank=self._rank(matrix),
                first=first,
            )
            first += -(-matrix.a.shape[0] // BLOCK_OUTPUTS) * BLOCK_OUTPUTS
        struct.rank = first
        return struct

    def _blocks(self, part: _Part, matrix: AdapterMatrix) -> npt.NDArray[Any]:
        """Return the factor b in the order that AdapterPart defines: [outputs / 16, rank / unit, 16, unit]."""
        rank, unit = self._rank(matrix), 4 // VALUE_BYTES[self._dtype]
        b: npt.NDArray[Any] = empty_values((part.outputs, rank), self._dtype)
        b[:] = 0
        b[:, : matrix.b.shape[1]] = matrix.b
        if part.pairs_of:
            together = np.empty_like(b)
            view = pairs_together(together, part.pairs_of)
            view[:] = b.reshape(view.shape)
            b = together
        blocks = b.reshape(-1, BLOCK_OUTPUTS, rank // unit, unit).swapaxes(1, 2)
        return np.ascontiguousarray(blocks)
