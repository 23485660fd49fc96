"""In how many bits weights stay in memory, settled from the settings and the checkpoint before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trioserve.contracts.errors import StartupError
from trioserve.model.settings import QuantizationName
from trioserve_kernels.native import BLOCK_FORMATS, WeightFormat

__all__ = ["Quantization", "settle_quantization", "weight_format"]

Quantization = Literal["none", "file", "int8", "int4"]


def settle_quantization(wish: QuantizationName, block_types: Mapping[str, str], *, dtype: str) -> Quantization:
    """What --quantization comes to with the native kernels. block_types: of the checkpoint's quantized matrices, by
    name. Raises StartupError if `file` is asked of a checkpoint that has none.

    auto keeps a quantized file's own blocks unless float32 is asked for: they are the exact weights, which bfloat16
    would round, a decode step reads a third of the bytes, and loading is faster. What it costs is said in
    kernels/README.md: rows in 8 bits raise the default model's perplexity by 0.6 %, as they do in llama.cpp; with AMX
    only steps of up to 4 rows have them.
    """
    if wish == "auto":
        return "file" if dtype == "bfloat16" and block_types else "none"
    if wish == "file" and not block_types:
        raise StartupError(
            "quantization is file, but the checkpoint has no weights that can be kept quantized: take int8, int4 or "
            "none, or a quantized checkpoint"
        )
    return wish


def weight_format(quantization: Quantization, name: str, block_type: str | None) -> WeightFormat:
    """How a matrix is kept. name: see names.py. block_type: of its blocks in the file, or None if it has none.

    Blocks that have the wanted number of bits already are kept as they are, with 4 those of fewer, too. The output
    layer has 8 bits at least: with 4 the default model chose another token than float32 15 times in 100, with 8 it is 4
    times.
    """
    own = WeightFormat.DENSE if block_type is None else BLOCK_FORMATS[block_type][1]
    if quantization == "none":
        return WeightFormat.DENSE
    if quantization == "file":
        return own
    has_eight = quantization == "int8" or name in ("embed.weight", "lm_head.weight")
    wanted, allowed = (WeightFormat.Q8, (8,)) if has_eight else (WeightFormat.Q4_MIN, (2, 3, 4))
    return own if own != WeightFormat.DENSE and own.bits in allowed else wanted
