"""Times each kernel in the shapes of real models, beside torch's attention and the speed of memory in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trioserve.bench.inside.gpu.kernel_checks import PAGE_TOKENS, PagedCase, four_bit_weight, kernels_of, tiles_of
from trioserve.bench.inside.gpu.machine import COLD_BYTES, REPEATS, Part, measured_bandwidth, seconds_of
from trioserve.model.layer_config import ExpertsConfig, MlpConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.real_shapes import SHAPES

__all__ = ["time_attention", "time_kernels"]

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
