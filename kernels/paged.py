"""How the attention of a step is cut into programs that walk block tables: sizes and work buffers, known to the host.

Nothing here is read back from the device, so a step can be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CHUNK_TILE_ROWS", "SPLIT_TOKENS", "DecodeWork", "chunk_tile_tokens", "split_count"]

# A decode's context is cut at multiples of this, whatever else is in the batch: so a row's sums are taken in the same
# order in every batch. A part's result (float32) is then at most 1 / 32 of the keys and values it stands for.
SPLIT_TOKENS = 256
CHUNK_TILE_ROWS = 64  # query rows of one program: tokens times the heads that share keys and values


def split_count(context_max: int, window: int | None) -> int:
    """How many parts the longest context of a batch needs; one more under a window, which may begin inside a part."""
    parts = -(-context_max // SPLIT_TOKENS)
    return parts if window is None else min(parts, -(-window // SPLIT_TOKENS) + 1)


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
