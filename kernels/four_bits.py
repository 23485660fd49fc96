"""4-bit weights for torch and Triton, created from the quantized blocks of a file.

A block has 32 values of one output channel. Byte n stores value n in its low half and value 16 + n in its high half.
Groups of 32, 64 or 128 values share a scale, and possibly a minimum. A value is scale * (code - 8), or with a minimum,
scale * code + minimum. In MXFP4 (OCP Microscaling Formats 1.0), a code is a number in e2m1, and a scale in e8m0 is
a power of 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK_TYPES", "FourBitWeight", "join", "kept_bytes", "weight_of_blocks"]

BLOCK_VALUES = 32
GROUP_BLOCKS_MAX = 4
# For each block type, the dtype of scale and minimum, and True if there is a minimum.
BLOCK_TYPES = {
    "Q4_0": (torch.float16, False),
    "Q4_1": (torch.float16, True),
    "Q4_F32": (torch.float32, True),
    "MXFP4": (torch.uint8, False),
}
"""Block types of structs.BLOCK_FORMATS that can stay packed."""


# Twice the numbers that e2m1 represents, by code. They are whole numbers.
_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """A packed weight.

    Attributes:
        codes: uint8 [outputs, inputs / 2].
        scales: [outputs, groups]. With uint8, the weight is in MXFP4.
        mins: [outputs, groups], or None.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        return self.inputs // self.scales.shape[1]

    @property
    def byte_count(self) -> int:
        parts = (self.codes, self.scales) if self.mins is None else (self.codes, self.scales, self.mins)
        return sum(part.nbytes for part in parts)

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype == torch.uint8

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Unpack all values. Each value is rounded only once.

        Args:
            dtype: dtype of the result.

        Returns:
            [outputs, inputs].
        """
        blocks = self.codes.view(self.outputs, -1, 1, BLOCK_VALUES // 2)
        codes = torch.cat((blocks & 15, blocks >> 4), -2).view(self.outputs, -1, self.group)
        if self.is_mxfp4:
            table = torch.tensor(_DOUBLED_E2M1, dtype=torch.float64, device=codes.device)
            exponents = self.scales.double()[..., None] - (_E8M0_BIAS + 1)
            # The steps through float64 and float32 are exact, except for numbers above float32's range: infinity.
            return (table[codes.int()] * exponents.exp2()).float().view(self.outputs, -1).to(dtype)
        codes, scales = codes.float(), self.scales.float()[..., None]
        values = scales * (codes - 8.0) if self.mins is None else scales * codes + self.mins.float()[..., None]
        return values.view(self.outputs, -1).to(dtype)


def kept_bytes(block_type: str, count: int) -> int | None:
    """Return the bytes of some values as blocks of 32. `join` may need fewer bytes, because it merges equal scales.

    Args:
        block_type: type of the blocks in the file.
        count: number of values.

    Returns:
        None if the block type cannot stay packed.
    """
    if block_type not in BLOCK_TYPES:
        return None
    dtype, has_min = BLOCK_TYPES[block_type]
    return count // BLOCK_VALUES * (BLOCK_VALUES // 2 + (2 if has_min else 1) * dtype.itemsize)


def weight_of_blocks(block_type: str, blocks: Tensor) -> FourBitWeight:
    """Create a weight from the blocks of a file, with groups of 32 values. `join` merges groups to larger groups.

    Args:
        block_type: a key of BLOCK_TYPES.
        blocks: uint8 [outputs, bytes of a row].
    """
    dtype, has_min = BLOCK_TYPES[block_type]
    size = (2 if has_min else 1) * dtype.itemsize
    parts = blocks.view(blocks.shape[0], -1, size + BLOCK_VALUES // 2)
    scales = parts[..., :size].contiguous().view(dtype)
    codes = parts[..., size:].reshape(blocks.shape[0], -1)
    return FourBitWeight(codes, scales[..., 0].contiguous(), scales[..., 1].contiguous() if has_min else None)


def join(parts: list[FourBitWeight]) -> FourBitWeight:
    """Concatenate weights along their outputs, and merge groups that have equal scales and mins.

    Args:
        parts: weights with equal numbers of inputs.

    Returns:
        A weight whose groups have 128, 64 or 32 values, the largest size that fits all parts.
    """
    codes = torch.cat([part.codes for part in parts])
    scales = torch.cat([part.scales for part in parts])
    mins = [part.mins for part in parts if part.mins is not None]
    all_mins = torch.cat(mins) if mins else None
    found = next(
        blocks
        for blocks in (GROUP_BLOCKS_MAX, 2, 1)
        if scales.shape[1] % blocks == 0 and all(_repeats(each, blocks) for each in (scales, all_mins))
    )
    return FourBitWeight(
        codes, scales[:, ::found].contiguous(), None if all_mins is None else all_mins[:, ::found].contiguous()
    )


def _repeats(numbers: Tensor | None, count: int) -> bool:
    if numbers is None:
        return True
    groups = numbers.view(numbers.shape[0], -1, count)
    return bool((groups == groups[..., :1]).all())
