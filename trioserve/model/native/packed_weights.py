"""Stores a model's matrices for the native kernels: formats, order in memory, and loading.

The quantization in memory depends on the settings and the checkpoint, and is chosen before any weight is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import StartupError
from trioserve.model.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    MlpConfig,
    SelectiveScanConfig,
)
from trioserve.model.loading.stored_tensor import Bytes
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Float32Array, Values
from trioserve.model.settings import QuantizationName
from trioserve.model.weights import RowsTarget, Slot
from trioserve_kernels.native import Library, WeightMemory
from trioserve_kernels.structs import (
    BLOCK_FORMATS,
    BLOCK_OUTPUTS,
    DTYPES,
    MatrixStruct,
    RowsKind,
    WeightFormat,
    matrix_of,
)

__all__ = [
    "Quantization",
    "settle_quantization",
    "weight_format",
    "HEAD",
    "PackedWeights",
    "packed_bytes",
    "packed_names",
    "has_pairs_together",
    "pairs_together",
]

Quantization = Literal["none", "file", "int8", "int4"]


def settle_quantization(requested: QuantizationName, block_types: Mapping[str, str], *, dtype: str) -> Quantization:
    """Return the quantization that the native kernels use.

    "auto" keeps the blocks of a quantized file, unless float32 is requested. These blocks are the exact weights, which
    bfloat16 would round. A decode step then reads a third of the bytes, and loading is faster.
    docs/explanation/kernels.md describes the disadvantage: inputs are rounded to 8 bits, which raises the default
    model's perplexity by 0.6 %, as in llama.cpp. With AMX, only steps of up to 4 rows round inputs to 8 bits.

    Args:
        requested: value of --quantization.
        block_types: block type of each quantized matrix of the checkpoint, by name.
        dtype: number format of the model.

    Raises:
        StartupError: `file` is requested, and the checkpoint has no quantized weights.
    """
    if requested == "auto":
        return "file" if dtype == "bfloat16" and block_types else "none"
    if requested == "file" and not block_types:
        raise StartupError(
            "quantization is file, but the checkpoint has no weights that can be kept quantized: use int8, int4 or "
            "none, or a quantized checkpoint"
        )
    return requested


def weight_format(quantization: Quantization, name: str, block_type: str | None) -> WeightFormat:
    """Return the format in which a matrix is stored in memory.

    Blocks that already have the requested number of bits stay unchanged. For int4, blocks with fewer bits also stay
    unchanged. The output layer has at least 8 bits, because fewer bits change too many tokens: compared with float32,
    the default model chose a different token in 15 of 100 cases with 4 bits, and in 4 of 100 cases with 8 bits.

    Args:
        quantization: result of settle_quantization.
        name: name of the matrix, see names.py.
        block_type: type of the matrix's blocks in the file. None if the file does not quantize it.
    """
    own = WeightFormat.DENSE if block_type is None else BLOCK_FORMATS[block_type][1]
    if quantization == "none":
        return WeightFormat.DENSE
    if quantization == "file":
        return own
    has_eight = quantization == "int8" or name in ("embed.weight", "lm_head.weight")
    wanted, allowed = (WeightFormat.Q8, (8,)) if has_eight else (WeightFormat.Q4_MIN, (2, 3, 4))
    return own if own != WeightFormat.DENSE and own.bits in allowed else wanted


HEAD = "head"


def has_pairs_together(attention: AttentionConfig | LatentAttentionConfig) -> bool:
    """Return True if the rows of rotated pairs are stored close together, see pairs_together.

    Kernels can then rotate queries and keys before a whole head is computed.

    Args:
        attention: attention of one layer.
    """
    if isinstance(attention, LatentAttentionConfig):
        return False
    return attention.head_dim % (2 * BLOCK_OUTPUTS) == 0 and attention.qk_norm == "none"


def pairs_together(heads: npt.NDArray[Any], dim: int) -> npt.NDArray[Any]:
    """Return a view, in the checkpoint's order, of rows that are stored with rotated pairs close together.

    The stored rows of a head alternate: 16 rows of the head's first half, then 16 rows of its second half.

    Args:
        heads: [heads * dim, ...], in stored order.
        dim: rows of one head.

    Returns:
        [heads, 2, dim / 32, 16, ...], a view in the checkpoint's order.
    """
    return heads.reshape(-1, dim // (2 * BLOCK_OUTPUTS), 2, BLOCK_OUTPUTS, *heads.shape[1:]).swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class _Part:
    """One or more matrices of the checkpoint with equal shapes, whose blocks of 16 outputs alternate.

    Attributes:
        pairs_of: size of heads whose halves alternate, see pairs_together. 0: outputs keep their order.
    """

    names: tuple[str, ...]
    rows: int
    columns: int
    format: WeightFormat
    pairs_of: int = 0

    @property
    def outputs(self) -> int:
        return len(self.names) * self.rows


class PackedWeights:
    """All matrices that a step reads, in one range of memory. The owner calls `close` when no step is running.

    Args:
        config: model.
        library: compiled kernels.
        dtype: number format of matrices that are not quantized.
        quantization: quantization of weights in memory.
        block_types: block types of the checkpoint's quantized matrices, by name, see StoredTensor.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        library: Library,
        dtype: Dtype,
        quantization: Quantization,
        block_types: Mapping[str, str],
    ) -> None:
        self._library = library
        self._dtype: Dtype = dtype
        self._block_types = block_types
        self._matrices = _matrices(config, lambda name: weight_format(quantization, name, block_types.get(name)))
        sizes = {part: self._packed_bytes(part) for matrix in self._matrices.values() for part in matrix}
        self.byte_count = sum(sizes.values())
        self.step_byte_count = round(sum(size * _share_of_step(config, part) for part, size in sizes.items()))
        self._memory = WeightMemory(library, self.byte_count)
        self._places = {part: self._memory.take(size) for part, size in sizes.items()}

    def matrix(self, name: str) -> MatrixStruct:
        """Return a matrix's description for the kernels. The description is empty if another stage has the matrix.

        Args:
            name: HEAD, or a name such as layers.0.qkv, with the names of LayerStruct.
        """
        if name not in self._matrices:
            return MatrixStruct()
        return matrix_of(
            *((self._places[part], part.outputs, part.columns, part.format) for part in self._matrices[name])
        )

    def address(self, name: str) -> int:
        """Return the address of a matrix that has one part.

        Args:
            name: see matrix.
        """
        (part,) = self._matrices[name]
        return self._places[part]

    def slots(self) -> Iterator[Slot]:
        for part, place in self._places.items():
            for index, name in enumerate(part.names):
                yield self._slot(name, part, place, index)

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        self._memory.close()

    def _packed_bytes(self, part: _Part) -> int:
        if part.format == WeightFormat.DENSE:
            return self._library.packed_bytes(part.outputs, part.columns, self._dtype)
        return self._library.quantized_bytes(part.outputs, part.columns, part.format)

    def _slot(self, name: str, part: _Part, place: int, index: int) -> Slot:
        """Return the loading slot of one of the part's matrices."""
        rows_at_once = part.pairs_of or BLOCK_OUTPUTS

        def rows_of(first_row: int, row_count: int) -> Slot:
            first_block = index + first_row // BLOCK_OUTPUTS * len(part.names)
            return self._rows_slot(name, part, place, row_count, first_block)

        return rows_of(0, part.rows)._replace(part=rows_of, part_rows=rows_at_once)

    def _rows_slot(self, name: str, part: _Part, place: int, row_count: int, first_block: int) -> Slot:
        def pack(weight: Values) -> None:
            library.pack(ordered(weight), place, first_block=first_block, block_step=step)

        def quantize(weight: Values) -> None:
            values = cast(Float32Array, ordered(weight))
            library.pack_values(part.format, values, place, first_block=first_block, block_step=step)

        def take(block_type: str, blocks: Bytes) -> None:
            rows = ordered(blocks)
            library.pack_blocks(block_type, rows, part.columns, place, first_block=first_block, block_step=step)

        def ordered(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if not part.pairs_of:
                return rows
            together = np.empty_like(rows)
            view = pairs_together(together, part.pairs_of)
            view[:] = rows.reshape(view.shape)
            return together

        step = len(part.names)
        library, shape = self._library, (row_count, part.columns)
        places = {"to": place, "first_block": first_block, "block_step": step, "pairs_of": part.pairs_of}
        if part.format == WeightFormat.DENSE:
            dense = RowsTarget(library, RowsKind.DENSE, DTYPES[self._dtype], **places)
            return Slot(name, shape, self._dtype, pack, target=dense)
        block_type = self._block_types.get(name)
        if block_type is None or BLOCK_FORMATS[block_type][1] != part.format:
            return Slot(name, shape, "float32", quantize)
        number, _ = BLOCK_FORMATS[block_type]
        blocks = RowsTarget(library, RowsKind.BLOCKS, number, **places)
        return Slot(name, shape, "float32", quantize, block_type, functools.partial(take, block_type), target=blocks)


def packed_bytes(config: ModelConfig, dtype: Dtype, quantization: Quantization, block_types: Mapping[str, str]) -> int:
    """Return the bytes of the matrices in memory, without padding. The compiled kernels are not needed.

    Args:
        config: model.
        dtype: number format of matrices that are not quantized.
        quantization: quantization of weights in memory.
        block_types: block types of the checkpoint's quantized matrices, by name.
    """
    matrices = _matrices(config, lambda name: weight_format(quantization, name, block_types.get(name)))
    return sum(
        math.ceil(part.outputs * part.columns * (part.format.value_bytes or VALUE_BYTES[dtype]))
        for matrix in matrices.values()
        for part in matrix
    )


def packed_names(config: ModelConfig) -> frozenset[str]:
    """Return the names of all tensors that are packed. The other tensors are vectors and a separate embedding table.

    Args:
        config: model.
    """
    matrices = _matrices(config, lambda name: WeightFormat.DENSE)
    return frozenset(name for matrix in matrices.values() for part in matrix for name in part.names)


def _share_of_step(config: ModelConfig, part: _Part) -> float:
    """Return the fraction of a part's bytes that a step of one token reads on average."""
    path = part.names[0].split(".")
    if path[:2] == ["layer_inputs", "embed"] or (path[0] == "embed" and not config.has_head):
        return 0.0  # A step of one token reads only one row of an embedding table.
    if path[2:3] != ["experts"]:
        return 1.0
    mlp = config.layers[int(path[1])].experts
    assert mlp is not None, "an expert in a layer without experts"
    return mlp.experts_per_token / mlp.choice_count


def _matrices(config: ModelConfig, format_of: Callable[[str], WeightFormat]) -> dict[str, tuple[_Part, ...]]:
    """Return the checkpoint matrices (`_Part`) that form each matrix in memory, by the name of the matrix in memory."""

    def part(rows: int, columns: int, *names: str, pairs_of: int = 0) -> _Part:
        formats = {format_of(name) for name in names}
        # Alternating matrices must have the same format. If the file uses two formats, both matrices become dense.
        return _Part(names, rows, columns, formats.pop() if len(formats) == 1 else WeightFormat.DENSE, pairs_of)

    def gated(name: str, middle: int, has_gate: bool = True) -> None:
        # Blocks of gate and up alternate, so a kernel can multiply both results immediately.
        names = (f"{name}.gate_proj.weight",) * has_gate + (f"{name}.up_proj.weight",)
        matrices[f"{name}.gate_up"] = (part(middle, hidden, *names),)
        matrices[f"{name}.down"] = (part(hidden, middle, f"{name}.down_proj.weight"),)

    def latents(layer: str, attention: LatentAttentionConfig) -> None:
        rank, queries = attention.query_rank, attention.query_size
        first = part(queries, hidden, f"{layer}.q_proj.weight")
        if rank is not None:
            first = part(rank, hidden, f"{layer}.q_a_proj.weight")
            matrices[f"{layer}.query_up"] = (part(queries, rank, f"{layer}.q_b_proj.weight"),)
        matrices[f"{layer}.qkv"] = (first, part(attention.entry_dim, hidden, f"{layer}.kv_a_proj.weight"))
        # Each head has its own matrix. The matrices of all heads are consecutive.
        rows = attention.head_count * attention.latent_dim
        key_up = _Part((f"{layer}.k_b_proj.weight",), rows, attention.plain_dim, WeightFormat.DENSE)
        value_up = _Part((f"{layer}.v_b_proj.weight",), attention.value_size, attention.latent_dim, WeightFormat.DENSE)
        matrices[f"{layer}.key_up"], matrices[f"{layer}.value_up"] = (key_up,), (value_up,)
        matrices[f"{layer}.output"] = (part(hidden, attention.value_size, f"{layer}.o_proj.weight"),)

    hidden, streams = config.hidden_size, config.streams
    matrices: dict[str, tuple[_Part, ...]] = {}
    if streams is not None:
        inputs = config.layer_count * streams.input_size
        table = part(streams.input_vocab_size, inputs, "layer_inputs.embed.weight")
        matrices["layer_inputs.embed"] = (table,)
        matrices["layer_inputs.proj"] = (part(inputs, hidden, "layer_inputs.proj.weight"),)
        for index in range(streams.count - 1):
            for way in ("in", "out"):
                matrices[f"streams.{index}.{way}"] = (part(hidden, hidden, f"streams.{index}.{way}_proj.weight"),)
    for index, described in enumerate(config.layers):
        attention, mlp = described.attention, described.mlp
        layer = f"layers.{index}"
        if isinstance(attention, LatentAttentionConfig):
            latents(layer, attention)
        elif isinstance(attention, AttentionConfig):
            heads, keys = attention.query_size, attention.key_size
            pairs_of = attention.head_dim if has_pairs_together(attention) else 0
            qkv = [part(heads, hidden, f"{layer}.q_proj.weight", pairs_of=pairs_of)]
            if attention.kv_from is None:
                qkv.append(part(keys, hidden, f"{layer}.k_proj.weight", pairs_of=pairs_of))
                qkv.append(part(attention.value_size, hidden, f"{layer}.v_proj.weight"))
            matrices[f"{layer}.qkv"], attended = tuple(qkv), attention.attended_size
            matrices[f"{layer}.output"] = (part(hidden, attended, f"{layer}.o_proj.weight"),)
            if attention.has_gate:
                gate = part(attention.gate_size, hidden, f"{layer}.q_gate_proj.weight")
                matrices[f"{layer}.attention_gate"] = (gate,)
        if (recurrent := described.recurrent) is not None:
            if isinstance(recurrent, DeltaNetConfig):
                *first, decay, share = recurrent.input_sizes.items()
                matrices[f"{layer}.input"] = (
                    *(part(size, hidden, f"{layer}.{name}.weight") for name, size in first),
                    # Weights that define the decay of a state are not quantized.
                    *(
                        _Part((f"{layer}.{name}.weight",), size, hidden, WeightFormat.DENSE)
                        for name, size in (decay, share)
                    ),
                )
                for name, size in recurrent.latent_sizes.items():
                    found = _Part((f"{layer}.{name}.weight",), size, recurrent.rank, WeightFormat.DENSE)
                    matrices[f"{layer}.{name.removesuffix('_b')}_up"] = (found,)
            else:
                matrices[f"{layer}.input"] = (part(recurrent.projected_size, hidden, f"{layer}.in_proj.weight"),)
            if isinstance(recurrent, SelectiveScanConfig):
                # Quantization would change the decay of a state, which these matrices define.
                for name, rows, columns in (
                    ("selection", sum(recurrent.selected_sizes), recurrent.channel_count),
                    ("time_step", recurrent.channel_count, recurrent.rank),
                ):
                    found = _Part((f"{layer}.{name}_proj.weight",), rows, columns, WeightFormat.DENSE)
                    matrices[f"{layer}.{name}"] = (found,)
            matrices[f"{layer}.mixed"] = (part(hidden, recurrent.inner_size, f"{layer}.out_proj.weight"),)
        if rank := described.laurel_rank:
            matrices[f"{layer}.laurel_in"] = (part(rank, hidden, f"{layer}.laurel_in.weight"),)
            matrices[f"{layer}.laurel_out"] = (part(hidden, rank, f"{layer}.laurel_out.weight"),)
        if streams is not None:
            size = streams.input_size
            matrices[f"{layer}.input_gate"] = (part(size, hidden, f"{layer}.input_gate.weight"),)
            matrices[f"{layer}.input_proj"] = (part(hidden, size, f"{layer}.input_proj.weight"),)
        if isinstance(mlp, MlpConfig):
            gated(layer, mlp.intermediate_size, mlp.has_gate)
        experts = described.experts
        if experts is None:
            continue
        # The router's weights are not quantized.
        router = _Part((f"{layer}.router.weight",), experts.choice_count, hidden, WeightFormat.DENSE)
        matrices[f"{layer}.router"] = (router,)
        for expert in config.experts_of(index):
            gated(f"{layer}.experts.{expert}", experts.intermediate_size, experts.has_gate)
        if experts.shared_size:
            gated(f"{layer}.shared", experts.shared_size, experts.has_gate)
    if config.tie_word_embeddings and (config.has_embedding or config.has_head):
        matrices[HEAD] = (part(config.vocab_count, hidden, "embed.weight"),)
    elif config.has_head:
        matrices[HEAD] = (part(config.vocab_count, hidden, "lm_head.weight"),)
    return matrices
