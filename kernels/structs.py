"""Structs and numbers of the native CPU library, as ctypes. The headers in cpu/ declare the same structs."""

from __future__ import annotations

import ctypes
import enum

__all__ = [
    "ACTIVATIONS",
    "AdapterLayerStruct",
    "AdapterMatrixStruct",
    "AdapterPartStruct",
    "BLOCK_FORMATS",
    "BLOCK_OUTPUTS",
    "CONV_KERNEL_MAX",
    "CollectivesStruct",
    "DTYPES",
    "ExpertsStruct",
    "FileRowsStruct",
    "GGML_FORMATS",
    "GatherFunction",
    "KV_FORMATS",
    "LatentStruct",
    "LaurelStruct",
    "LayerStreamsStruct",
    "LayerStruct",
    "LoadingStruct",
    "MatrixStruct",
    "ModelStruct",
    "NORM_KINDS",
    "QK_NORMS",
    "RecurrentStruct",
    "RoomFunction",
    "RowsKind",
    "SCORINGS",
    "STATE_NORMS",
    "SUM_DTYPES",
    "SamplingStruct",
    "StepStruct",
    "StreamsStruct",
    "SumFunction",
    "WeightFormat",
    "matrix_of",
]

DTYPES = {"float32": 0, "bfloat16": 1}
NORM_KINDS = {"rms": 0, "layer": 1, "layer_bare": 1, "layer_biased": 2}
QK_NORMS = {"none": 0, "head": 1, "unit": 1, "heads": 2, "each": 2, "row": 3}
SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
STATE_NORMS = {"gated": 0, "ungated": 1, "none": 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "gelu": 3, "relu": 4, "relu2": 5, "xielu": 6}
SUM_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
KV_FORMATS = {"plain": 0, "int8": 1, "fp8": 2}
"""Formats of keys and values: the model's dtype, or 8 bits. See cpu/kv_format.h."""
BLOCK_OUTPUTS = 16  # output channels in one block of a packed weight
CONV_KERNEL_MAX = 64  # cpu/state_space.h must have the same number.
HEAD_DIM_MAX = 512  # Size of the buffers in which one head is rotated.

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class WeightFormat(enum.IntEnum):
    """Storage format of a packed weight: the model's dtype, or quantized. cpu/quantized.h has the same numbers.

    32 values share a float16 scale, and in formats with MIN also a float16 minimum. In formats with WIDE, scales and
    minimums are float32. In formats with FINE, 16 values share a float32 scale. In FINE formats with 2 and 3 bits, the
    scales are integers, and a float16 factor multiplies the scales of 256 values. In formats with CURVE, values are
    read from a table of 16 numbers. FLOAT has FP4 values and bfloat16 scales.
    """

    DENSE = 0
    Q8 = 1
    Q4 = 2
    Q4_MIN = 3
    Q4_WIDE = 4
    Q8_FINE = 5
    Q8_WIDE = 6
    Q2_FINE = 7
    Q3_FINE = 8
    Q4_CURVE = 9
    Q4_CURVE_WIDE = 10
    Q4_FLOAT = 11

    @property
    def bits(self) -> int:
        """Bits per value of a quantized format, without scales."""
        return int(self.name[1])

    @property
    def value_bytes(self) -> float:
        """Bytes per value of a quantized format, with scales and minimums. 0 for DENSE."""
        return _GROUP_BYTES.get(self, 0) / 32


# Bytes of 32 values: first the values, then their scales and minimums.
_GROUP_BYTES = {
    WeightFormat.Q8: 32 + 2,
    WeightFormat.Q4: 16 + 2,
    WeightFormat.Q4_MIN: 16 + 2 * 2,
    WeightFormat.Q4_WIDE: 16 + 2 * 4,
    WeightFormat.Q8_FINE: 32 + 2 * 4,
    WeightFormat.Q8_WIDE: 32 + 2 * 4,
    WeightFormat.Q2_FINE: 8 + 2 + 2 * 2 / 8,
    WeightFormat.Q3_FINE: 12 + 2 + 2 / 8,
    WeightFormat.Q4_CURVE: 16 + 2,
    WeightFormat.Q4_CURVE_WIDE: 16 + 4,
    WeightFormat.Q4_FLOAT: 16 + 2,
}


GGML_FORMATS = {
    "Q4_0": (2, WeightFormat.Q4),
    "Q4_1": (3, WeightFormat.Q4_MIN),
    "Q5_0": (6, WeightFormat.Q8),
    "Q5_1": (7, WeightFormat.Q8_WIDE),
    "Q8_0": (8, WeightFormat.Q8),
    "Q2_K": (10, WeightFormat.Q2_FINE),
    "Q3_K": (11, WeightFormat.Q3_FINE),
    "Q4_K": (12, WeightFormat.Q4_WIDE),
    "Q5_K": (13, WeightFormat.Q8_WIDE),
    "Q6_K": (14, WeightFormat.Q8_FINE),
    "IQ4_NL": (20, WeightFormat.Q4_CURVE),
    "IQ4_XS": (23, WeightFormat.Q4_CURVE_WIDE),
    "MXFP4": (39, WeightFormat.Q4_FLOAT),
}
"""ggml's number of each block type, and the format that stores it without loss."""
BLOCK_FORMATS = {**GGML_FORMATS, "Q4_F32": (1000, WeightFormat.Q4_WIDE), "Q8_F32": (1001, WeightFormat.Q8_WIDE)}
"""All block types, with two of our own. A block of 32 values has a float32 scale, a float32 min, and the values: 24
bytes with 4 bits per value as in Q4_0, or 40 bytes with 8 bits as in Q8_0."""


class WeightPartStruct(ctypes.Structure):
    """Python twin of the C++ struct WeightPart in cpu/step.h. `format` is a WeightFormat."""

    _fields_ = (("data", _pointer), *((name, _int) for name in ("first_block", "block_count", "format", "inputs")))


class MatrixStruct(ctypes.Structure):
    """Python twin of the C++ struct Matrix in cpu/step.h."""

    _fields_ = (("parts", WeightPartStruct * 6),)


class ExpertsStruct(ctypes.Structure):
    """Python twin of the C++ struct Experts in cpu/step.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("router", "shared_gate_up", "shared_down")),
        *((name, _pointer) for name in ("gate_up", "down", "shared_gate", "score_bias")),
        *((name, _pointer) for name in ("router_bias", "gate_up_bias", "down_bias")),
        *((name, _pointer) for name in ("router_norm", "norm", "output_norm", "shared_output_norm", "expert_scale")),
        *((name, _int) for name in ("count", "own_first", "own_count", "per_token", "normalizes")),
        *((name, _int) for name in ("middle", "shared_middle")),
        *((name, _int) for name in ("scoring", "group_count", "groups_per_token", "group_leaders")),
        *((name, _int) for name in ("weighs_inputs", "identity_first")),
        *((name, _float) for name in ("scale", "logit_cap", "nearness")),
    )


class RecurrentStruct(ctypes.Structure):
    """Python twin of the C++ struct Recurrent in cpu/step.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("input", "output", "selection", "time_step", "gate_up", "decay_up")),
        *((name, _pointer) for name in ("input_bias", "output_bias")),
        *((name, _pointer) for name in ("conv_weights", "conv_bias", "rates", "skips", "time_step_bias", "gate_norm")),
        ("selection_norm", _pointer),
        *((name, _int) for name in ("channels", "kernel", "projected", "heads", "head_dim", "groups", "vectors")),
        *((name, _int) for name in ("norm", "norm_groups", "is_delta", "in_turn", "rank", "latent")),
        *((name, _float) for name in ("time_step_min", "time_step_max", "selection_eps", "share_scale", "norm_eps")),
    )


class LatentStruct(ctypes.Structure):
    """Python twin of the C++ struct Latent in cpu/step.h."""

    _fields_ = (
        ("query_up", MatrixStruct),
        *((name, _pointer) for name in ("key_up", "value_up", "query_norm", "latent_norm")),
        *((name, _int) for name in ("query_rank", "plain_dim", "turned_dim", "value_dim")),
        ("norm_eps", _float),
    )


class LaurelStruct(ctypes.Structure):
    """Python twin of the C++ struct Laurel in cpu/step.h."""

    _fields_ = (*((name, MatrixStruct) for name in ("inwards", "outwards")), ("norm", _pointer), ("rank", _int))


class StreamsStruct(ctypes.Structure):
    """Python twin of the C++ struct Streams in cpu/step.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("input_table", "input_projection")),
        *((name, _pointer) for name in ("ins", "outs", "input_norm")),
        *((name, _int) for name in ("count", "active", "input_size", "input_vocab_size")),
        ("table_scale", _float),
    )


class LayerStreamsStruct(ctypes.Structure):
    """Python twin of the C++ struct LayerStreams in cpu/step.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("input_gate", "input_projection")),
        *((name, _pointer) for name in ("input_norm", "router_norm", "router", "prediction", "correction", "scale")),
    )


class LayerStruct(ctypes.Structure):
    """Python twin of the C++ struct Layer in cpu/step.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _pointer) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, _pointer) for name in ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")),
        *((name, _pointer) for name in ("query_norm", "key_norm", "sinks", "activation_weights", "slopes")),
        *((name, _int) for name in ("pairs_together", "window", "rotary", "qk_norm", "activation", "is_parallel")),
        *((name, _int) for name in ("section", "has_temperature", "head_count", "kv_head_count", "head_dim")),
        *((name, _int) for name in ("has_turned_norms", "value_dim")),
        *((name, _float) for name in ("query_factor", "score_cap", "residual_scale", "clip")),
        *((name, _pointer) for name in ("experts", "shortcut", "recurrent", "latent")),
        *((name, _pointer) for name in ("laurel", "streams", "value_norm", "scale")),
        ("shares_kv", _int),
        *((name, _pointer) for name in ("attention_gate", "attention_gate_bias")),
        *((name, _int) for name in ("has_softplus_gate", "gates_heads", "has_cutoff")),
        ("cutoff", _float),
        *((name, _int) for name in ("sums_attention", "sums_mlp", "has_gate")),
    )


class ModelStruct(ctypes.Structure):
    """Python twin of the C++ struct Model in cpu/step.h."""

    _fields_ = (
        *((name, _int) for name in ("dtype", "layer_count", "hidden_size", "intermediate_size")),
        *((name, _int) for name in ("turned_dim", "vocab_size")),
        *((name, _int) for name in ("page_tokens", "batch_invariant", "norm_kind", "rotary_count", "latent_dim")),
        ("kv_format", _int),
        *((name, _int) for name in ("temperature_interval", "temperature_first")),
        *((name, _float) for name in ("norm_eps", "embedding_scale", "logit_scale", "logit_cap")),
        ("temperature_scale", _float),
        *((name, _pointer) for name in ("frequencies", "magnitudes", "axes", "layers", "embedding")),
        ("head", MatrixStruct),
        *((name, _pointer) for name in ("norm", "streams", "collectives")),
        *((name, _int) for name in ("vocab_first", "vocab_count")),
        *((name, _pointer) for name in ("head_bias", "positions", "embedding_norm")),
        ("position_first", _int),
    )


class SamplingStruct(ctypes.Structure):
    """Python twin of the C++ struct Sampling in cpu/sampling.h. All zeros choose the token with the largest logit."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("position", ctypes.c_int64),
        ("mask", _pointer),
        *((name, _float) for name in ("temperature", "min_p")),
        *((name, _float) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        *((name, _int) for name in ("top_k", "ids_first", "biases_first", "bias_count", "hidden_count")),
        *((name, _int) for name in ("seen_count", "output_count", "top_count", "wants_logprobs", "needs_logits")),
    )


class StepStruct(ctypes.Structure):
    """Python twin of the C++ struct Step in cpu/step.h."""

    _fields_ = (
        *((name, _int) for name in ("row_count", "chunk_count", "sampled_count", "top_count_max")),
        *((name, _pointer) for name in ("token_ids", "chunk_starts", "chunk_counts", "table_firsts", "tables")),
        *((name, _pointer) for name in ("pages", "sampled_rows", "samplings", "sampling_ids", "sampling_biases")),
        *((name, _pointer) for name in ("next_ids", "flaws", "logprobs", "top_ids", "hidden")),
        ("waited_for", _pointer),
        *((name, _pointer) for name in ("states", "span_firsts", "spans")),
        ("tapped", _pointer),
        ("adapters", _pointer),
        ("masks_filled", _pointer),
        ("given_rows", _pointer),
        ("given_values", _pointer),
        *((name, _int) for name in ("given_count", "given_width")),
        ("positions", _pointer),
        ("row_ends", _pointer),
    )


class RowsKind(enum.IntEnum):
    """Conversion of rows of a file into a weight.

    COPIED rows stay unchanged. DENSE rows are packed, and their type is a number of DTYPES. BLOCKS rows are packed, and
    their type is a number of BLOCK_FORMATS.
    """

    COPIED = 0
    DENSE = 1
    BLOCKS = 2


class FileRowsStruct(ctypes.Structure):
    """Python twin of the C++ struct FileRows in cpu/loading.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("offset", "rows", "columns", "row_bytes")),
        ("to", _pointer),
        *((name, ctypes.c_int64) for name in ("first_block", "block_step", "counts_as")),
        *((name, _int) for name in ("file", "kind", "type", "pairs_of")),
    )


class LoadingStruct(ctypes.Structure):
    """Python twin of the C++ struct Loading in cpu/loading.h."""

    _fields_ = (
        ("rows", _pointer),
        *((name, ctypes.c_int64) for name in ("count", "next", "bytes_done")),
        ("is_stopped", _int),
    )


class AdapterPartStruct(ctypes.Structure):
    """Python twin of the C++ struct AdapterPart in cpu/adapters.h."""

    _fields_ = (
        ("b", _pointer),
        *((name, _int) for name in ("first_block", "block_step", "block_count", "rank", "first")),
    )


class AdapterMatrixStruct(ctypes.Structure):
    """Python twin of the C++ struct AdapterMatrix in cpu/adapters.h. All zeros add nothing."""

    _fields_ = (("a", _pointer), ("parts", AdapterPartStruct * 3), ("rank", _int))


class AdapterLayerStruct(ctypes.Structure):
    """Python twin of the C++ struct AdapterLayer in cpu/adapters.h."""

    _fields_ = tuple((name, AdapterMatrixStruct) for name in ("qkv", "output", "gate_up", "down"))


RoomFunction = ctypes.CFUNCTYPE(_pointer, _pointer, ctypes.c_int64)
SumFunction = ctypes.CFUNCTYPE(_int, _pointer, _pointer, ctypes.c_int64, _int, _pointer)
GatherFunction = ctypes.CFUNCTYPE(None, _pointer, _pointer, ctypes.c_int64, _pointer)


class CollectivesStruct(ctypes.Structure):
    """Python twin of the C++ struct Collectives in cpu/collectives.h."""

    _fields_ = (
        ("context", _pointer),
        *((name, _int) for name in ("rank", "size")),
        ("room", RoomFunction),
        ("sum", SumFunction),
        ("gather", GatherFunction),
    )


def matrix_of(*parts: tuple[int, int, int, WeightFormat]) -> MatrixStruct:
    """Describe a matrix that consists of up to four packed matrices, whose output channels are concatenated.

    Args:
        parts: address, outputs, inputs and format of each packed matrix. The number of outputs must be a multiple of
            16, except in the last one.
    """
    matrix = MatrixStruct()
    first_block = 0
    for index, (data, outputs, inputs, format) in enumerate(parts):
        block_count = -(-outputs // BLOCK_OUTPUTS)
        matrix.parts[index] = WeightPartStruct(data, first_block, block_count, format, inputs)
        first_block += block_count
    return matrix
