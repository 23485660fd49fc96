"""Quantized blocks to plain numbers, by the gguf package."""

from __future__ import annotations

import gguf.constants
import gguf.quants
import numpy as np
import numpy.typing as npt

__all__ = ["dequantize", "slice_blocks"]

# The package makes several temporary copies of what it is given: in slices of this size they stay in the CPU's caches
# and take 4 MB, and loading takes half the time.
SLICE_VALUES = 2**18


def slice_blocks(block_values: int) -> int:
    """How many blocks are best dequantized in one call."""
    return SLICE_VALUES // block_values


def dequantize(storage_name: str, blocks: npt.NDArray[np.uint8], values: npt.NDArray[np.float32]) -> None:
    """Write the numbers that the blocks stand for into `values`.

    blocks: uint8 [blocks, bytes of a block], contiguous. values: float32 [blocks, values of a block], contiguous.
    storage_name: a quantized type, as in gguf.STORAGE_TYPES. Scales that are not finite give values that are not.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # As one row: the package works on rows in groups of 16, and many short ones would cost ten times as much.
        kind = gguf.constants.GGMLQuantizationType[storage_name]
        values.reshape(1, -1)[:] = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
