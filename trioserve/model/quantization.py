"""Choice of the weights' quantization in memory, from the settings and the checkpoint, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import QuantizationName
from trioserve_kernels.native import BLOCK_FORMATS, WeightFormat

__all__ = ["Quantization", "settle_quantization", "weight_format"]

Quantization = Literal["none", "file", "int8", "int4"]


def settle_quantization(requested: QuantizationName, block_types: Mapping[str, str], *, dtype: str) -> Quantization:
    """Return the quantization that the native kernels use.

    auto keeps the blocks of a quantized file, unless float32 is requested. These blocks are the exact weights, which
    bfloat16 would round. A decode step then reads a third of the bytes, and loading is faster. The cost is described in
    docs/explanation/kernels.md: rows in 8 bits raise the default model's perplexity by 0.6 %, as in llama.cpp. With AMX
    only steps of up to 4 rows have them.

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
    """Return the format in which a matrix is kept in memory.

    Blocks that already have the requested number of bits are kept unchanged. For int4, blocks of fewer bits are kept,
    too. The output layer has at least 8 bits. With 4 bits the default model chose another token than float32 in 15 of
    100 cases, and with 8 bits in 4 of 100.

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
