"""Keys and values of 8 bits, in torch: what the bytes of a head are, [D + 2]. Behind its numbers, int8 or fp8 (e4m3,
https://arxiv.org/abs/2209.05433), lies their scale, in bfloat16.

A page's dtype says in which of the two its bytes are. The scale is near to the largest number's 127th or 448th, and
follows from the head's own numbers alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CODED_DTYPES", "SCALE_BYTES", "decode", "encode", "head_dim_of", "is_coded", "taken"]

CODED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_BYTES = 2
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TINY = 1e-30  # a head of smaller numbers is zeros


def is_coded(pages: Tensor) -> bool:
    return pages.dtype in LARGEST


def head_dim_of(pages: Tensor) -> int:
    """pages: [..., D], or [..., D + 2] of 8 bits."""
    return pages.shape[-1] - SCALE_BYTES if is_coded(pages) else pages.shape[-1]


def encode(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] to uint8 [..., D + 2]. A head with a number that is not finite gets a scale that is none."""
    numbers = heads.float()
    most = numbers.abs().amax(-1, keepdim=True)
    is_finite = numbers.isfinite().all(-1, keepdim=True)
    # Rounded up, so that the largest number fits.
    bits = ((most / LARGEST[dtype]).masked_fill_(most <= TINY, 0.0).view(torch.int32) + 0xFFFF) & -0x10000
    scales = bits.view(torch.float32)
    shares = (numbers / scales).masked_fill_(~is_finite | (scales == 0.0), 0.0)
    codes = shares.round_() if dtype == torch.int8 else shares
    scales = scales.masked_fill(~is_finite, float("nan")).to(torch.bfloat16)
    return torch.cat((codes.to(dtype).view(torch.uint8), scales.view(torch.uint8)), -1)


def decode(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D + 2] of a dtype of 8 bits to [..., D], each number rounded once."""
    numbers, scales = coded[..., :-SCALE_BYTES], coded[..., -SCALE_BYTES:]
    return (numbers.float() * scales.contiguous().view(torch.bfloat16).float()).to(dtype)


def taken(pages: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of some pages, as numbers: in `dtype`, if they are of 8 bits."""
    if not is_coded(pages):
        return pages.index_select(0, indices)
    return decode(pages.view(torch.uint8).index_select(0, indices).view(pages.dtype), dtype)
