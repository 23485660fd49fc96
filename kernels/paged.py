"""Splits a step's attention into GPU programs: sizes and work buffers.

All of it is computed on the host without reading from the device, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "CHUNK_TILE_ROWS",
    "DECODE_PARTS_MAX",
    "DECODE_PROGRAMS",
    "SPLIT_TOKENS",
    "DecodeWork",
    "chunk_tile_tokens",
    "decode_program_count",
    "split_count",
]

# A decode's context is split into parts of this many tokens. If that gives more than DECODE_PARTS_MAX parts, the length
# of a part is doubled until it fits. Only the row's own length decides, so a row sums in the same order in every batch.
# A part's result (float32) takes at most 1 / 128 of the memory of its keys and values (16 bits), per head that shares
# them. With longer parts, most of a GPU would be idle while contexts are short.
SPLIT_TOKENS = 128
# The parts' results of 64 rows with 32 heads of 128 numbers take 34 MB. 32 parts of one row keep 256 programs busy.
DECODE_PARTS_MAX = 32
# Programs of one launch. A GPU runs about a thousand at a time. Several times as many even out rows of unequal length.
# The limit keeps programs without work cheap: a captured launch is made for the longest context.
DECODE_PROGRAMS = 4_096
CHUNK_TILE_ROWS = 64  # query rows of one program: tokens times the heads that share keys and values


def split_count(context_max: int, window: int | None) -> int:
    """Return how many parts a context can need. A window may begin inside a part, so it can need one more.

    Args:
        context_max: longest context in tokens.
        window: tokens that a row sees, or None for all.
    """
    parts = min(-(-context_max // SPLIT_TOKENS), DECODE_PARTS_MAX)
    return parts if window is None else min(parts, -(-window // SPLIT_TOKENS) + 1)


def decode_program_count(rows: int, kv_heads: int, parts: int) -> int:
    """Return how many programs share the parts of one row and key/value head.

    This does not change any result, because each part is computed by one program.

    Args:
        rows: rows of the batch.
        kv_heads: key/value heads.
        parts: parts per row, see `split_count`.
    """
    return max(1, min(parts, DECODE_PROGRAMS // (rows * kv_heads)))


def chunk_tile_tokens(group: int) -> int:
    """Return how many tokens of a prompt chunk one program computes.

    Args:
        group: query heads per key/value head.
    """
    return max(1, CHUNK_TILE_ROWS // group)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Buffers for the partial results of decodes. All layers of a stream share them and overwrite them.

    A batch may use fewer rows and parts.

    Attributes:
        sums: float32 [rows, H, parts_max, D].
        scales: float32 [rows, H, parts_max, 2]: largest score of a part, and sum of its weights.
    """

    sums: Tensor
    scales: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, parts_max: int, head_dim: int, device: torch.device) -> DecodeWork:
        return cls(
            torch.empty(rows, heads, parts_max, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, heads, parts_max, 2, dtype=torch.float32, device=device),
        )

    @property
    def parts_max(self) -> int:
        return self.sums.shape[2]
