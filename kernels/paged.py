"""How the attention of a step is cut into programs that walk block tables: sizes and work buffers, known to the host.

Nothing here is read back from the device, so a step can be captured into a CUDA graph.
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

# A decode's context is cut into parts of this many tokens, of twice as many where these were more than
# DECODE_PARTS_MAX, and so on. Its own length alone decides, whatever else is in the batch: so a row's sums are taken in
# the same order in every batch. A part's result (float32) is at most 1 / 128 of its keys and values (in half formats),
# for each head that shares these. With longer parts most of a GPU would have nothing to do while contexts are short.
SPLIT_TOKENS = 128
# The parts' results of 64 rows and 32 heads of 128 numbers are 34 MB. Of one row, they keep 256 programs busy.
DECODE_PARTS_MAX = 32
# Of one launch. A GPU runs about a thousand of them at a time; a few times as many even out rows of unequal length,
# and programs that find nothing to do, since a captured launch is made for the longest context, stay cheap.
DECODE_PROGRAMS = 4_096
CHUNK_TILE_ROWS = 64  # query rows of one program: tokens times the heads that share keys and values


def split_count(context_max: int, window: int | None) -> int:
    """How many parts a context of up to context_max tokens needs at most; one more under a window, which may begin
    inside a part."""
    parts = min(-(-context_max // SPLIT_TOKENS), DECODE_PARTS_MAX)
    return parts if window is None else min(parts, -(-window // SPLIT_TOKENS) + 1)


def decode_program_count(rows: int, kv_heads: int, parts: int) -> int:
    """How many programs share the parts of a row and key/value head. Changes no number: a part is computed whole."""
    return max(1, min(parts, DECODE_PROGRAMS // (rows * kv_heads)))


def chunk_tile_tokens(group: int) -> int:
    """Tokens of a prompt chunk that one program computes. group: query heads to a key/value head."""
    return max(1, CHUNK_TILE_ROWS // group)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Where the parts of decodes are kept until they are joined. Layers of one stream share it: each overwrites it.

    sums: float32 [rows, H, parts_max, D]; scales: float32 [rows, H, parts_max, 2], a part's largest score and its
    sum of weights. A batch may use fewer rows and parts.
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
