"""8-bit format of keys and values, in torch. A head has D + 2 bytes: D numbers, then their scale in bfloat16.

The numbers are int8 or fp8 (e4m3, https://arxiv.org/abs/2209.05433), depending on the dtype of the page. The scale is
about the head's largest number divided by 127 (int8) or 448 (fp8), and does not depend on other heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CODED_DTYPES", "LARGEST", "SCALE_BYTES", "TINY", "decode", "encode", "head_dim_of", "is_coded", "taken"]

CODED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_BYTES = 2
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-30  # If the largest number of a head is not larger than this, all numbers are stored as zeros.


def is_coded(pages: Tensor) -> bool:
    return pages.dtype in LARGEST


def head_dim_of(pages: Tensor) -> int:
    """Return D, the number of dimensions of a head.

    Args:
        pages: [..., D], or [..., D + 2] in 8 bits.
    """
    return pages.shape[-1] - SCALE_BYTES if is_coded(pages) else pages.shape[-1]


def encode(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert heads to 8 bits.

    Args:
        heads: [..., D]. A head with NaN or infinity gets a scale of NaN.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        uint8 [..., D + 2].
    """
    numbers = heads.float()
    most = numbers.abs().amax(-1, keepdim=True)
    is_finite = numbers.isfinite().all(-1, keepdim=True)
    # The scale is rounded up, so that dividing by it does not make the largest number overflow.
    bits = ((most / LARGEST[dtype]).masked_fill_(most <= TINY, 0.0).view(torch.int32) + 0xFFFF) & -0x10000
    scales = bits.view(torch.float32)
    shares = (numbers / scales).masked_fill_(~is_finite | (scales == 0.0), 0.0)
    codes = shares.round_() if dtype == torch.int8 else shares
    scales = scales.masked_fill(~is_finite, float("nan")).to(torch.bfloat16)
    return torch.cat((codes.to(dtype).view(torch.uint8), scales.view(torch.uint8)), -1)


def decode(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert 8-bit heads to numbers. Each number is rounded only once.

    Args:
        coded: [..., D + 2] in an 8-bit dtype.
        dtype: dtype of the result.

    Returns:
        [..., D].
    """
    numbers, scales = coded[..., :-SCALE_BYTES], coded[..., -SCALE_BYTES:]
    return (numbers.float() * scales.contiguous().view(torch.bfloat16).float()).to(dtype)


def taken(pages: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy some pages, and convert 8-bit pages to numbers.

    Args:
        pages: one layer's cache.
        indices: int64 [n], page indexes.
        dtype: dtype of the result if the pages have 8 bits.
    """
    if not is_coded(pages):
        return pages.index_select(0, indices)
    return decode(pages.view(torch.uint8).index_select(0, indices).view(pages.dtype), dtype)
