"""Compares each kernel with the reference, which computes in float64 from the same numbers.

The inputs are random, in the layout of a real step: pages at random positions, tiles of chunks, packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trioserve.bench.inside.gpu.machine import Part
from trioserve_kernels import Kernels, reference, reference_fused
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens, split_count

__all__ = ["PAGE_TOKENS", "PagedCase", "check_kernels", "four_bit_weight", "kernels_of", "tiles_of"]

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


# Rounding a result to bfloat16 changes it by up to 2 ** -8 of its size. Attention also rounds its weights.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}
# Numbers per head, query heads and key/value heads.
HEADS = ((64, 9, 3), (80, 4, 4), (96, 8, 2), (128, 16, 2), (192, 8, 8), (256, 8, 4))
CONTEXTS = [1, 16, 17, 127, 128, 129, 1_000, 5_000]
COUNTS = [1, 16, 5, 127, 100, 1, 333, 64]  # tokens of the last chunk of each context
# Window, cap of the scores and sinks.
VARIANTS = ((None, None, False), (300, None, False), (None, 30.0, False), (300, None, True))
VOCABULARY = 128_256
# If two tokens have almost equal results, rounding may change the choice. The probability is about 1e-6.
CHANGED_CHOICES_MAX = 0.01


def check_kernels(part: Part) -> None:
    """Compare every kernel with the reference, in all number formats and head sizes.

    Args:
        part: where the errors go.
    """
    _check_rows(part)
    for head_dim, heads, kv_heads in HEADS if part.is_gpu else HEADS[:1]:
        for dtype in TOLERANCES if part.is_gpu else (torch.float32,):
            if not part.has_time():
                return
            _check_heads(part, head_dim, heads, kv_heads, dtype)
    _check_four_bits(part)
    _check_sampling(part)


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest error, relative to numbers above 1."""
    return float(((got.double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max())


def _check_rows(part: Part) -> None:
    kernels = kernels_of(part)
    for dtype, tolerance in TOLERANCES.items():
        hidden, product, weight = (part.numbers(*shape, dtype=dtype) for shape in ((33, 4_096), (33, 4_096), (4_096,)))
        added = (hidden + product).double()
        wanted = reference.rms_norm(added, weight.double(), 1e-5)
        part.compare(
            f"add_rms_norm_, {dtype}", _error(kernels.add_rms_norm_(hidden, product, weight, 1e-5), wanted), tolerance
        )
        part.compare(f"add_rms_norm_, {dtype}, residual", _error(hidden, added), tolerance)
        gated = part.numbers(33, 4_096, dtype=dtype)
        wanted = reference.activate_and_mul(gated.double())
        part.compare(f"activate_and_mul, {dtype}", _error(kernels.activate_and_mul(gated), wanted), tolerance)


def _check_heads(part: Part, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    kernels, tolerance = kernels_of(part), TOLERANCES[dtype]
    shape = f"heads {heads}/{kv_heads} of {head_dim}, {dtype}"
    qkv = part.numbers(20, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = part.numbers(20, 1, head_dim, dtype=dtype), part.numbers(20, 1, head_dim, dtype=dtype)
    cache = part.numbers(64, 2 * kv_heads * head_dim, dtype=dtype)
    slots = torch.randperm(64, device=part.device)[:20]
    norm = part.numbers((heads + kv_heads) * head_dim, dtype=dtype) * 0.1  # Norms round twice more.
    for has_norm in (False, True):
        turned, kept, wanted, wanted_cache = qkv.clone(), cache.clone(), qkv.double(), cache.double()
        exact_norm = (norm.double(), 1e-5) if has_norm else None
        reference.rotary_and_store_kv_(wanted, cos.double(), sin.double(), wanted_cache, slots, kv_heads, exact_norm)
        kernels.rotary_and_store_kv_(turned, cos, sin, kept, slots, kv_heads, (norm, 1e-5) if has_norm else None)
        name = f"rotary_and_store_kv_, {shape}{', norms' if has_norm else ''}"
        part.compare(name, max(_error(turned, wanted), _error(kept, wanted_cache)), tolerance)
    case = PagedCase.random(part, CONTEXTS, kv_heads, head_dim, dtype)
    exact = case.pages.double()
    starts, tiles = tiles_of(COUNTS, heads // kv_heads, part.device)
    for window, cap, has_sinks in VARIANTS:
        sinks = part.numbers(heads, dtype=torch.float32) if has_sinks else None
        exact_sinks = None if sinks is None else sinks.double()
        variant = f"{shape}, window {window}, cap {cap}, {'with' if has_sinks else 'no'} sinks"
        parts, work = case.decode_work(heads, window)
        queries = part.numbers(len(CONTEXTS), heads * head_dim, dtype=dtype)
        got, wanted = torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.float64)
        tables = (case.block_tables, case.contexts, window, parts, work, cap)
        kernels.paged_decode_(got, queries, case.pages, *tables, sinks)
        reference.paged_decode_(wanted, queries.double(), exact, *tables, exact_sinks)
        part.compare(f"paged_decode_, {variant}", _error(got, wanted), tolerance)
        queries = part.numbers(sum(COUNTS), heads * head_dim, dtype=dtype)
        got, wanted = torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.float64)
        chunk_tables = (case.block_tables, case.contexts, starts, tiles, window, cap)
        kernels.paged_chunks_(got, queries, case.pages, *chunk_tables, sinks)
        reference.paged_chunks_(wanted, queries.double(), exact, *chunk_tables, exact_sinks)
        part.compare(f"paged_chunks_, {variant}", _error(got, wanted), tolerance)


def _check_four_bits(part: Part) -> None:
    kernels = kernels_of(part)
    for group, has_min in ((128, True), (32, False)):
        weight = four_bit_weight(part, 1_000, 2_048, group, has_min=has_min)
        for rows in (1, 16, 17, 300):
            values, bias = part.numbers(rows, 2_048), part.numbers(1_000)
            wanted = values.double() @ weight.numbers(torch.bfloat16).double().T + bias.double()
            part.compare(
                f"four_bit_linear, groups of {group}, {rows} rows",
                _error(kernels.four_bit_linear(values, weight, bias), wanted),
                TOLERANCES[torch.bfloat16],
            )


def _check_sampling(part: Part) -> None:
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (1.2, 0, 0.9, 0.0), (1.0, 100, 0.95, 0.05)]
    parameters = torch.tensor(settings * 8, dtype=torch.float64, device=part.device)
    words = torch.randint(-(2**63), 2**63 - 1, (len(parameters),), device=part.device)
    scores = part.numbers(len(parameters), VOCABULARY if part.is_gpu else 1_000) * 3
    chosen = kernels_of(part).choose_tokens(scores, parameters, words)
    different = (chosen != reference.choose_tokens(scores, parameters, words)).any(0).sum()
    part.compare("choose_tokens, share of other tokens", float(different) / len(parameters), CHANGED_CHOICES_MAX)
