"""Quantized blocks to plain numbers, by the gguf package."""

from __future__ import annotations

import gguf.constants
import gguf.quants
import numpy as np
import numpy.typing as npt

__all__ = ["dequantize"]


def dequantize(storage_name: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The numbers that the blocks stand for, one after the other.

    blocks: uint8 [blocks, bytes of a block], contiguous; the package makes several temporary copies of them, so give it
    no more at once than the CPU's caches hold. storage_name: a quantized type, as in gguf.STORAGE_TYPES. Scales that
    are not finite give values that are not.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # As one row: the package works on rows in groups of 16, and many short ones would cost ten times as much.
        kind = gguf.constants.GGMLQuantizationType[storage_name]
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(blocks.reshape(1, -1), kind)
    return values
