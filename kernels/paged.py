"""Computes how a step's attention is divided into GPU programs, and the sizes of work buffers.

The host computes these sizes without reading from the device, so a step can be captured in a CUDA graph.
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
    "latent_parts_max",
    "split_count",
]

# Tokens of one part of a decode's context. If a context has more than DECODE_PARTS_MAX parts, the length of a part is
# the smallest multiple of this number that needs at most DECODE_PARTS_MAX parts. The length depends only on the row's
# context, so a row sums in the same order in every batch. For each query head, a part's result (float32) needs at most
# 1 / 128 of the memory of the part's keys and values (16 bits). With longer parts, most of a GPU would be idle while
# contexts are short.
SPLIT_TOKENS = 128
# With this limit, the parts' results of 64 rows with 32 heads of 128 numbers need 34 MB, and one row can use 256
# programs at the same time.
DECODE_PARTS_MAX = 32
# Programs of one launch. A GPU runs about a thousand programs at a time. A launch needs several times as many, so that
# rows of unequal length are balanced. The number is limited because a captured launch is made for the longest context,
# and with short contexts most of its programs have no work.
DECODE_PROGRAMS = 4_096
# Query rows of one program. The number is the product of tokens and query heads that share keys and values.
CHUNK_TILE_ROWS = 64


def latent_parts_max(heads: int) -> int:
    """Return the largest number of parts of a context of latents.

    The parts' results grow with the number of heads, while the latents do not. 640 parts of all heads of a row need
    1.3 MB with latents of 512 numbers.

    Args:
        heads: query heads.
    """
    return max(4, min(DECODE_PARTS_MAX, 640 // heads))


def split_count(context_max: int, window: int | None, parts_max: int = DECODE_PARTS_MAX) -> int:
    """Return the largest number of parts that a context can have.

    A window may begin inside a part. Then one more part is needed.

    Args:
        context_max: longest context in tokens.
        window: number of tokens that a row attends to, or None for all tokens.
        parts_max: limit of the number of parts.
    """
    parts = min(-(-context_max // SPLIT_TOKENS), parts_max)
    return parts if window is None else min(parts, -(-window // SPLIT_TOKENS) + 1)


def decode_program_count(rows: int, kv_heads: int, parts: int) -> int:
    """Return the number of programs that compute the parts of one row and key/value head.

    The number does not change any result, because one program computes a whole part.

    Args:
        rows: rows of the batch.
        kv_heads: key/value heads.
        parts: parts per row, see `split_count`.
    """
    return max(1, min(parts, DECODE_PROGRAMS // (rows * kv_heads)))


def chunk_tile_tokens(group: int) -> int:
    """Return the number of tokens of a prompt chunk that one program computes.

    Args:
        group: query heads per key/value head.
    """
    return max(1, CHUNK_TILE_ROWS // group)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Buffers for the partial results of decodes. All layers that run on one CUDA stream share and overwrite them.

    A batch may use fewer rows and parts.

    Attributes:
        sums: float32 [rows, parts_max, H, D].
        scales: float32 [rows, parts_max, H, 2], largest score of a part, and sum of the part's weights.
        arrivals: int32 [rows, H], programs that have written their parts. It is 0 before and after every launch.
    """

    sums: Tensor
    scales: Tensor
    arrivals: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, parts_max: int, head_dim: int, device: torch.device) -> DecodeWork:
        return cls(
            torch.empty(rows, parts_max, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, parts_max, heads, 2, dtype=torch.float32, device=device),
            torch.zeros(rows, heads, dtype=torch.int32, device=device),
        )

    @property
    def parts_max(self) -> int:
        return self.sums.shape[1]
