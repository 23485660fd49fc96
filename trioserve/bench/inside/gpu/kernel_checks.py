"""Compares each kernel with the reference, and times each kernel in the shapes of real models.

The reference computes in float64 from the same numbers. The times stand beside those of torch's attention and the speed
of memory in the same run. The inputs are random, in the layout of a real step: pages at random positions, tiles of
chunks, packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trioserve.bench.inside.gpu.machine import COLD_BYTES, REPEATS, Part, measured_bandwidth, seconds_of
from trioserve.model.layer_config import ExpertsConfig, MlpConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.real_shapes import SHAPES
from trioserve_kernels import Kernels, reference, reference_fused
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens, split_count

__all__ = [
    "PAGE_TOKENS",
    "PagedCase",
    "check_kernels",
    "four_bit_weight",
    "kernels_of",
    "tiles_of",
    "time_attention",
    "time_kernels",
]


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


# Rows and context of each decode.
DECODES = ((1, 512), (1, 8_192), (1, 65_536), (1, 131_072), (16, 2_048), (64, 512), (64, 4_096), (256, 1_024))
# Chunks, tokens of each chunk and its context.
CHUNKS = (
    (1, 512, 512),
    (1, 512, 8_192),
    (1, 2_048, 8_192),
    (1, 8_192, 8_192),
    (8, 256, 1_024),
    (1, 2_048, 65_536),
    (1, 2_048, 131_072),
)
CAPTURED_CONTEXT = 131_072  # A server captures its graphs for the longest context, whatever the contexts of a step.
HEAD_DIMS = (64, 96, 128, 256)
SAMPLINGS = {
    "greedy": (0.0, 0.0, 1.0, 0.0),
    "temperature": (1.0, 0.0, 1.0, 0.0),
    "top_p 0.9": (1.0, 0.0, 0.9, 0.0),
    "top_k 50, top_p 0.9": (1.0, 50.0, 0.9, 0.0),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel to time.

    Attributes:
        name: label in the report.
        make: function that creates tensors and returns a launch with these tensors.
        moved_bytes: bytes that a launch must read and write.
        operations: multiplications and additions, if they limit the kernel's speed. 0 for other kernels.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    moved_bytes: int
    operations: int = 0

    def report(self, part: Part, bandwidth: float) -> None:
        """Time launches over enough different tensors to move COLD_BYTES, so that none is found in the L2 cache.

        Args:
            part: where the figures go.
            bandwidth: bytes per second of the device's memory.
        """
        copies = min(REPEATS, -(-COLD_BYTES // self.moved_bytes) + 1) if part.is_gpu else 1
        seconds = seconds_of([self.make() for _ in range(copies)], part.device)
        figures = {"us": seconds * 1e6, "share_of_memory_bound": self.moved_bytes / bandwidth / seconds}
        if self.operations:
            figures["TFLOP_per_s"] = self.operations / seconds / 1e12
        part.put(self.name, **figures)
        if part.is_gpu:
            torch.cuda.empty_cache()


def time_kernels(part: Part, shapes: list[str]) -> None:
    """Time the kernels of the layers and of sampling.

    Args:
        part: where the figures go.
        shapes: names in SHAPES.
    """
    _time_all(part, (timed for shape in shapes for timed in _layer_kernels(part, shape, SHAPES[shape])))


def time_attention(part: Part) -> None:
    """Time attention of decodes and of chunks, own kernels beside torch's.

    Args:
        part: where the figures go.
    """
    heads, kv_heads = (32, 8) if part.is_gpu else (4, 2)
    _time_all(part, _attention_kernels(part, heads, kv_heads))


def _time_all(part: Part, kernels: Iterator[Timed]) -> None:
    bandwidth = measured_bandwidth(part.device)
    part.put("memory", GB_per_s=bandwidth / 1e9)
    for timed in kernels:
        if not part.has_time():
            break
        timed.report(part, bandwidth)


def _layer_kernels(part: Part, shape: str, config: ModelConfig) -> Iterator[Timed]:
    """Yield the kernels of a model. moved_bytes counts each bfloat16 number once."""
    mlp, hidden = config.layers[0].mlp, config.hidden_size
    assert isinstance(mlp, MlpConfig | ExpertsConfig), "every shape has an MLP or experts"
    middle, head_dim, kernels = mlp.intermediate_size, config.heads.head_dim, kernels_of(part)
    kv_heads = config.heads.kv_head_count
    qkv_size, kv_size = (config.heads.head_count + 2 * kv_heads) * head_dim, 2 * kv_heads * head_dim
    numbers = part.numbers

    def norm(rows: int) -> Callable[[], object]:
        return partial(kernels.add_rms_norm_, numbers(rows, hidden), numbers(rows, hidden), numbers(hidden), 1e-5)

    def activation(rows: int) -> Callable[[], object]:
        return partial(kernels.activate_and_mul, numbers(rows, 2 * middle))

    def rotary(rows: int) -> Callable[[], object]:
        angles, cache = numbers(rows, 1, head_dim), numbers(4_096, kv_size)
        slots = torch.randperm(4_096, device=part.device)[:rows]
        return partial(kernels.rotary_and_store_kv_, numbers(rows, qkv_size), angles, angles, cache, slots, kv_heads)

    def four_bits(rows: int) -> Callable[[], object]:
        # The number of inputs is rounded up to whole groups, which the smallest model needs.
        weight = four_bit_weight(part, 2 * middle, -(-hidden // 128) * 128, 128, has_min=True)
        return partial(kernels.four_bit_linear, numbers(rows, weight.inputs), weight, None)

    def choice(rows: int, setting: tuple[float, ...]) -> Callable[[], object]:
        parameters = torch.tensor([setting] * rows, dtype=torch.float64, device=part.device)
        words = torch.arange(rows, device=part.device)
        return partial(kernels.choose_tokens, numbers(rows, config.vocab_size), parameters, words)

    for rows in (1, 64, 2_048):
        yield Timed(f"{shape}: add_rms_norm_, {rows} rows", partial(norm, rows), 2 * hidden * (4 * rows + 1))
        yield Timed(f"{shape}: activate_and_mul, {rows} rows", partial(activation, rows), 2 * 3 * middle * rows)
        moved = 2 * rows * (2 * qkv_size + kv_size // 2 + 2 * head_dim)
        yield Timed(f"{shape}: rotary_and_store_kv_, {rows} rows", partial(rotary, rows), moved)
    for rows in (1, 16, 64, 2_048):
        yield Timed(
            f"{shape}: four_bit_linear, gate and up, {rows} rows",
            partial(four_bits, rows),
            2 * middle * (hidden // 2 + hidden // 128 * 8) + 2 * rows * (hidden + 2 * middle),
            4 * rows * middle * hidden,
        )
    for rows in (1, 64):
        for name, setting in SAMPLINGS.items():
            moved = 2 * rows * config.vocab_size
            yield Timed(f"{shape}: choose_tokens, {rows} rows, {name}", partial(choice, rows, setting), moved)


def _attention_kernels(part: Part, heads: int, kv_heads: int) -> Iterator[Timed]:
    decodes = DECODES if part.is_gpu else ((2, 64),)
    for head_dim in HEAD_DIMS if part.is_gpu else (16,):
        kv_size = 2 * kv_heads * head_dim
        for captured in (None, CAPTURED_CONTEXT) if part.is_gpu else (None,):
            for rows, context in decodes if head_dim == 128 or captured is None else ():
                yield Timed(
                    f"paged_decode_, heads of {head_dim}, {rows} x {context}, captured for {captured or context}",
                    partial(_decode, part, rows, context, heads, kv_heads, head_dim, captured),
                    2 * rows * (context * kv_size + 2 * heads * head_dim),
                )
        for chunks, count, context in CHUNKS if part.is_gpu else ((2, 16, 32),):
            moved = 2 * chunks * (context * kv_size + 2 * count * heads * head_dim)
            operations = 4 * chunks * heads * head_dim * count * (context - count // 2)
            sizes = (chunks, count, context, heads, kv_heads, head_dim)
            case = f"heads of {head_dim}, {chunks} x {count} of {context}"
            yield Timed(f"paged_chunks_, {case}", partial(_chunks, part, *sizes), moved, operations)
            yield Timed(f"torch's attention, {case}", partial(_torch_attention, part, *sizes), moved, operations)


def _decode(
    part: Part, rows: int, context: int, heads: int, kv_heads: int, head_dim: int, captured: int | None
) -> Callable[[], object]:
    case = PagedCase.random(part, [context] * rows, kv_heads, head_dim)
    queries = part.numbers(rows, heads * head_dim)
    parts, work = case.decode_work(heads, None, captured)
    tables = (case.block_tables, case.contexts, None, parts, work)
    return partial(kernels_of(part).paged_decode_, torch.empty_like(queries), queries, case.pages, *tables)


def _chunks(
    part: Part, chunks: int, count: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> Callable[[], object]:
    case = PagedCase.random(part, [context] * chunks, kv_heads, head_dim)
    queries = part.numbers(chunks * count, heads * head_dim)
    tables = (case.block_tables, case.contexts, *tiles_of([count] * chunks, heads // kv_heads, part.device), None)
    return partial(kernels_of(part).paged_chunks_, torch.empty_like(queries), queries, case.pages, *tables)


def _torch_attention(
    part: Part, chunks: int, count: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> Callable[[], object]:
    """Gather the pages and compute with torch: flash attention of variable length, or plain attention on a CPU."""
    case = PagedCase.random(part, [context] * chunks, kv_heads, head_dim)
    queries = part.numbers(chunks * count, heads, head_dim)
    row_starts = torch.arange(0, chunks + 1, dtype=torch.int32, device=part.device) * count
    context_starts = torch.arange(0, chunks + 1, dtype=torch.int32, device=part.device) * context

    def gathered() -> Tensor:
        pages = case.pages.index_select(0, case.block_tables.view(-1))
        rounded = -(-context // PAGE_TOKENS) * PAGE_TOKENS
        return pages.view(chunks, rounded, 2, kv_heads, head_dim)[:, :context]

    def flash() -> object:
        keys_values = gathered().reshape(chunks * context, 2, kv_heads, head_dim)
        keys, values = keys_values[:, 0], keys_values[:, 1]
        return torch.ops.aten._flash_attention_forward(
            queries, keys, values, row_starts, context_starts, count, context, 0.0, True, False, scale=head_dim**-0.5
        )

    def plain() -> object:
        keys, values = gathered().permute(2, 0, 3, 1, 4)
        by_chunk = queries.view(chunks, count, heads, head_dim).transpose(1, 2)
        mask = torch.ones(count, context, dtype=torch.bool, device=part.device).tril(context - count)
        return scaled_dot_product_attention(by_chunk, keys, values, attn_mask=mask, enable_gqa=True)

    return flash if part.is_gpu else plain
