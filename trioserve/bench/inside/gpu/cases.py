"""Random inputs of kernels in the layout of a real step: pages at random positions, tiles of chunks, packed weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trioserve.bench.inside.gpu.part import Part
from trioserve_kernels import Kernels, reference_fused
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens, split_count

__all__ = ["PAGE_TOKENS", "PagedCase", "four_bit_weight", "kernels_of", "tiles_of"]

PAGE_TOKENS = 16


def kernels_of(part: Part) -> Kernels:
    """Return the Triton kernels, or on a CPU the reference with the same functions.

    Args:
        part: measures on a CPU or a GPU.
    """
    if not part.is_gpu:
        return reference_fused
    from trioserve_kernels import triton

    return triton


@dataclass(frozen=True, slots=True)
class PagedCase:
    """KV caches and block tables of sequences.

    Attributes:
        pages: [pages, PAGE_TOKENS, 2, kv_heads, head_dim], random numbers.
        block_tables: int32 [sequences, width].
        contexts: int32 [sequences], tokens of each sequence.
    """

    pages: Tensor
    block_tables: Tensor
    contexts: Tensor

    @classmethod
    def random(
        cls, part: Part, contexts: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
    ) -> PagedCase:
        """Make caches of sequences whose pages are at random positions.

        Args:
            part: measures on a CPU or a GPU.
            contexts: tokens of each sequence.
            kv_heads: key/value heads.
            head_dim: numbers per head.
            dtype: number format of keys and values.
        """
        widths = [-(-context // PAGE_TOKENS) for context in contexts]
        places = torch.randperm(sum(widths), dtype=torch.int32)
        tables = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
        for row, of_row in enumerate(torch.split(places, widths)):
            tables[row, : len(of_row)] = of_row
        pages = part.numbers(sum(widths), PAGE_TOKENS, 2, kv_heads, head_dim, dtype=dtype)
        return cls(pages, tables.to(part.device), torch.tensor(contexts, dtype=torch.int32, device=part.device))

    def decode_work(self, heads: int, window: int | None, context_max: int | None = None) -> tuple[int, DecodeWork]:
        """Return the number of parts and the buffers of a decode step.

        Args:
            heads: query heads.
            window: see `paged_decode_`.
            context_max: longest context for which a graph is captured. None: the longest of these sequences.
        """
        longest = int(self.contexts.max()) if context_max is None else context_max
        parts = split_count(longest, window)
        return parts, DecodeWork.make(len(self.contexts), heads, parts, self.pages.shape[-1], self.pages.device)


def tiles_of(counts: list[int], group: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the row_starts and tiles of chunks.

    Args:
        counts: tokens of each chunk.
        group: query heads per key/value head.
        device: device of the tensors.
    """
    step = chunk_tile_tokens(group)
    tiles = [(chunk, first) for chunk, count in enumerate(counts) for first in range(0, count, step)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return starts.to(device), torch.tensor(tiles, dtype=torch.int32, device=device)


def four_bit_weight(part: Part, outputs: int, inputs: int, group: int, *, has_min: bool) -> FourBitWeight:
    """Return random weights of four bits.

    Args:
        part: measures on a CPU or a GPU.
        outputs: rows of the weight.
        inputs: columns of the weight.
        group: columns that share a scale.
        has_min: True for a minimum per group as GPTQ has it, False for scales only.
    """
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=part.device)
    scales = torch.randn(outputs, inputs // group, device=part.device) * 0.02
    return FourBitWeight(codes, scales if has_min else scales.half(), -7.0 * scales if has_min else None)
