"""Checks and times the Triton kernels on this machine's GPU: `python -m trioserve_kernels.gpu_bench`.

First, every kernel is compared with the reference kernels, which compute in float64 with the same bfloat16 inputs. Then
each kernel is captured in a CUDA graph, replayed and timed. The table also shows the time that the GPU's memory needs
to move the same bytes, measured with one large copy. The launches of a graph use several sets of tensors in turn, so
that a launch does not find its data in the L2 cache. The exit status is 1 if a result is wrong. The program takes at
most a few minutes.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trioserve_kernels import reference
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens, split_count

__all__ = ["main"]

# Rounding a result to bfloat16 changes it by up to 2 ** -8 of its size. Attention also rounds its weights.
TOLERANCE = 1e-2
SECONDS_MAX = 240.0  # After this time, no other kernel is timed.
REPEATS = 20  # number of launches in a graph
REPLAYS = 5  # Number of replays of a graph. The time of the fastest replay is shown.
# Bytes that are moved between two uses of a set of tensors. The number is twice the size of the largest L2 cache.
COLD_BYTES = 2**28
PAGE_TOKENS = 16
# Each model has query heads, key/value heads, head_dim, hidden_size, intermediate_size and vocab_size.
MODELS = {"SmolLM2-135M": (9, 3, 64, 576, 1_536, 49_152), "Llama-3-8B": (32, 8, 128, 4_096, 14_336, 128_256)}
CHECKED_HEADS = ((64, 9, 3), (80, 4, 4), (96, 8, 2), (128, 16, 2))


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel to time.

    Attributes:
        name: label in the table.
        make: function that creates tensors and returns a launch with these tensors.
        moved_bytes: bytes that a launch must read and write.
        operations: number of multiplications and additions, if they limit the kernel's speed. 0 for other kernels.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    moved_bytes: int
    operations: int = 0

    def launches(self) -> list[Callable[[], object]]:
        """Create launches with different tensors, enough to move COLD_BYTES before a tensor is reused. The maximum is
        REPEATS.
        """
        return [self.make() for _ in range(min(REPEATS, -(-COLD_BYTES // self.moved_bytes) + 1))]


@dataclass(frozen=True, slots=True)
class Paged:
    pages: Tensor
    block_tables: Tensor
    contexts: Tensor


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def paged(contexts: list[int], kv_heads: int, head_dim: int) -> Paged:
    """Create caches and block tables of sequences whose pages are at random positions.

    Args:
        contexts: tokens of each sequence.
        kv_heads: key/value heads.
        head_dim: numbers per head.
    """
    widths = [-(-context // PAGE_TOKENS) for context in contexts]
    places = torch.randperm(sum(widths), dtype=torch.int32)
    tables = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
    for row, part in enumerate(torch.split(places, widths)):
        tables[row, : len(part)] = part
    pages = numbers(sum(widths), PAGE_TOKENS, 2, kv_heads, head_dim)
    return Paged(pages, tables.cuda(), torch.tensor(contexts, dtype=torch.int32, device="cuda"))


def tiles_of(counts: list[int], group: int) -> tuple[Tensor, Tensor]:
    """Return the row_starts and tiles of chunks.

    Args:
        counts: tokens of each chunk.
        group: query heads per key/value head.
    """
    step = chunk_tile_tokens(group)
    tiles = [(chunk, first) for chunk, count in enumerate(counts) for first in range(0, count, step)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return starts.cuda(), torch.tensor(tiles, dtype=torch.int32, device="cuda")


def checks() -> Iterator[tuple[str, float]]:
    """Yield the name of each comparison, and its largest error relative to numbers above 1."""
    from trioserve_kernels import triton as kernels

    def error(got: Tensor, wanted: Tensor) -> float:
        return float(((got.double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max())

    hidden, product, weight = numbers(33, 4_096), numbers(33, 4_096), numbers(4_096)
    added = hidden + product
    wanted = reference.rms_norm(added.double(), weight.double(), 1e-5)
    yield "add_rms_norm_", error(kernels.add_rms_norm_(hidden, product, weight, 1e-5), wanted)
    yield "  its residual", error(hidden, added.double())
    yield "activate_and_mul", error(kernels.activate_and_mul(hidden), reference.activate_and_mul(hidden.double()))
    for head_dim, heads, kv_heads in CHECKED_HEADS:
        shape = f"head_dim {head_dim}, heads {heads}/{kv_heads}"
        qkv = numbers(20, (heads + 2 * kv_heads) * head_dim)
        cos, sin = numbers(20, 1, head_dim), numbers(20, 1, head_dim)
        cache, slots = numbers(64, 2 * kv_heads * head_dim), torch.randperm(64, device="cuda")[:20]
        wanted, wanted_cache = qkv.double(), cache.double()
        reference.rotary_and_store_kv_(wanted, cos.double(), sin.double(), wanted_cache, slots, kv_heads)
        kernels.rotary_and_store_kv_(qkv, cos, sin, cache, slots, kv_heads)
        yield f"rotary_and_store_kv_, {shape}", max(error(qkv, wanted), error(cache, wanted_cache))
        contexts = [1, 16, 17, 127, 128, 129, 1_000, 5_000]
        counts = [1, 16, 5, 127, 100, 1, 333, 64]
        case = paged(contexts, kv_heads, head_dim)
        exact = case.pages.double()
        starts, tiles = tiles_of(counts, heads // kv_heads)
        for window in (None, 300):
            parts = split_count(max(contexts), window)
            work = DecodeWork.make(len(contexts), heads, parts, head_dim, case.pages.device)
            queries = numbers(len(contexts), heads * head_dim)
            got, wanted = torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.float64)
            rest = (case.block_tables, case.contexts, window, parts, work)
            kernels.paged_decode_(got, queries, case.pages, *rest)
            reference.paged_decode_(wanted, queries.double(), exact, *rest)
            yield f"paged_decode_, {shape}, window {window}", error(got, wanted)
            queries = numbers(sum(counts), heads * head_dim)
            got, wanted = torch.zeros_like(queries), torch.zeros_like(queries, dtype=torch.float64)
            tables = (case.block_tables, case.contexts, starts, tiles, window)
            kernels.paged_chunks_(got, queries, case.pages, *tables)
            reference.paged_chunks_(wanted, queries.double(), exact, *tables)
            yield f"paged_chunks_, {shape}, window {window}", error(got, wanted)
    for group, has_min in ((128, True), (32, False)):
        packed = four_bits(1_000, 2_048, group, has_min)
        for rows in (1, 16, 17, 300):
            values, bias = numbers(rows, 2_048), numbers(1_000)
            wanted = values.double() @ packed.numbers(torch.bfloat16).double().T + bias.double()
            yield (
                f"four_bit_linear, groups of {group}, {rows} rows",
                error(kernels.four_bit_linear(values, packed, bias), wanted),
            )
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (1.2, 0, 0.9, 0.0), (1.0, 100, 0.95, 0.05)]
    parameters = torch.tensor(settings * 8, dtype=torch.float64, device="cuda")
    words = torch.randint(-(2**63), 2**63 - 1, (40,), device="cuda")
    scores = numbers(40, 128_256) * 3
    chosen = kernels.choose_tokens(scores, parameters, words)
    different = (chosen != reference.choose_tokens(scores, parameters, words)).any(0).sum()
    # If two tokens have almost equal results, rounding may change the choice. The probability is about 1e-6.
    yield "choose_tokens, share of other tokens", float(different) / 40


def timed(model: str) -> Iterator[Timed]:
    """Yield the kernels in the shapes of a model. moved_bytes counts each bfloat16 number once.

    Args:
        model: a key of MODELS.
    """
    heads, kv_heads, head_dim, hidden_size, middle, vocab_size = MODELS[model]
    qkv_size, kv_size = (heads + 2 * kv_heads) * head_dim, 2 * kv_heads * head_dim
    for rows in (1, 64, 2_048):
        yield Timed(
            f"add_rms_norm_, {rows} rows", partial(norm_launch, rows, hidden_size), 2 * hidden_size * (4 * rows + 1)
        )
        yield Timed(f"activate_and_mul, {rows} rows", partial(activation_launch, rows, middle), 2 * 3 * middle * rows)
        yield Timed(
            f"rotary_and_store_kv_, {rows} rows",
            partial(rotary_launch, rows, heads, kv_heads, head_dim),
            2 * rows * (2 * qkv_size + kv_size // 2 + 2 * head_dim),
        )
    for rows in (1, 16, 64, 2_048):
        yield Timed(
            f"four_bit_linear, gate and up, groups of 128, {rows} rows",
            partial(four_bit_launch, rows, 2 * middle, hidden_size),
            2 * middle * (hidden_size // 2 + hidden_size // 128 * 8) + 2 * rows * (hidden_size + 2 * middle),
            4 * rows * middle * hidden_size,
        )
    for rows, context in ((1, 512), (1, 8_192), (16, 2_048), (64, 512), (64, 4_096)):
        yield Timed(
            f"paged_decode_, {rows} x {context}",
            partial(decode_launch, rows, context, heads, kv_heads, head_dim),
            2 * rows * (context * kv_size + 2 * heads * head_dim),
        )
    for chunks, count, context in ((1, 512, 512), (1, 2_048, 8_192), (8, 256, 1_024)):
        yield Timed(
            f"paged_chunks_, {chunks} x {count} of {context}",
            partial(chunks_launch, chunks, count, context, heads, kv_heads, head_dim),
            2 * chunks * (context * kv_size + 2 * count * heads * head_dim),
            4 * chunks * heads * head_dim * count * (context - count // 2),
        )
    for rows in (1, 64):
        settings = {
            "greedy": (0.0, 0.0, 1.0, 0.0),
            "temperature": (1.0, 0.0, 1.0, 0.0),
            "top_p 0.9": (1.0, 0.0, 0.9, 0.0),
            "top_k 50, top_p 0.9": (1.0, 50.0, 0.9, 0.0),
        }
        for name, setting in settings.items():
            yield Timed(
                f"choose_tokens, {rows} rows, {name}",
                partial(choice_launch, rows, vocab_size, setting),
                2 * rows * vocab_size,
            )


def norm_launch(rows: int, hidden_size: int) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    hidden, product, weight = numbers(rows, hidden_size), numbers(rows, hidden_size), numbers(hidden_size)
    return partial(kernels.add_rms_norm_, hidden, product, weight, 1e-5)


def activation_launch(rows: int, middle: int) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    return partial(kernels.activate_and_mul, numbers(rows, 2 * middle))


def four_bits(outputs: int, inputs: int, group: int, has_min: bool) -> FourBitWeight:
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randn(outputs, inputs // group, device="cuda") * 0.02
    return FourBitWeight(codes, scales if has_min else scales.half(), -7.0 * scales if has_min else None)


def four_bit_launch(rows: int, outputs: int, inputs: int) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    # The number of inputs is rounded up to whole groups, which the smallest model needs.
    weight = four_bits(outputs, -(-inputs // 128) * 128, 128, True)
    return partial(kernels.four_bit_linear, numbers(rows, weight.inputs), weight, None)


def rotary_launch(rows: int, heads: int, kv_heads: int, head_dim: int) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    qkv, angles = numbers(rows, (heads + 2 * kv_heads) * head_dim), numbers(rows, 1, head_dim)
    cache, slots = numbers(4_096, 2 * kv_heads * head_dim), torch.randperm(4_096, device="cuda")[:rows]
    return partial(kernels.rotary_and_store_kv_, qkv, angles, angles, cache, slots, kv_heads)


def decode_launch(rows: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    case = paged([context] * rows, kv_heads, head_dim)
    queries = numbers(rows, heads * head_dim)
    parts = split_count(context, None)
    work = DecodeWork.make(rows, heads, parts, head_dim, queries.device)
    tables = (case.block_tables, case.contexts, None, parts, work)
    return partial(kernels.paged_decode_, torch.empty_like(queries), queries, case.pages, *tables)


def chunks_launch(
    chunks: int, count: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    case = paged([context] * chunks, kv_heads, head_dim)
    queries = numbers(chunks * count, heads * head_dim)
    tables = (case.block_tables, case.contexts, *tiles_of([count] * chunks, heads // kv_heads), None)
    return partial(kernels.paged_chunks_, torch.empty_like(queries), queries, case.pages, *tables)


def choice_launch(rows: int, vocab_size: int, setting: tuple[float, ...]) -> Callable[[], object]:
    from trioserve_kernels import triton as kernels

    parameters = torch.tensor([setting] * rows, dtype=torch.float64, device="cuda")
    return partial(kernels.choose_tokens, numbers(rows, vocab_size), parameters, torch.arange(rows, device="cuda"))


def seconds_of(launches: Sequence[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Return the time of one launch in seconds, measured in a graph of several launches.

    Args:
        launches: launches over different tensors, used in turn.
        repeats: number of launches in the graph.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # The first launch compiles the kernel.
            launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # All results are kept, so that each launch writes to different memory.
        results = [launch() for launch in itertools.islice(itertools.cycle(launches), repeats)]
    graph.replay()
    others = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    best = float("inf")
    for _ in range(REPLAYS):
        others.sum()  # Only reads, because the GPU would write changed data back to memory during the timing.
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            for _ in range(2)
        )
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        best = min(best, began.elapsed_time(ended) / 1_000 / repeats)
    del results
    return best


def copy_bandwidth() -> float:
    """Return the memory bandwidth of a copy of 1 GiB: bytes read and written per second."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / seconds_of([lambda: target.copy_(source)], repeats=5)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here")
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is not installed: pip install triton")
    import triton

    began = time.monotonic()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    wrong = 0
    with torch.inference_mode():
        print(f"\n{'compared in bfloat16':60} largest error (allowed: {TOLERANCE})")
        for name, error in checks():
            good = error < TOLERANCE  # The comparison is False for NaN.
            wrong += not good
            print(f"{name:60} {error:.1e}{'' if good else '   WRONG'}", flush=True)
        bandwidth = copy_bandwidth()
        print(f"\na copy of 1 GiB: {bandwidth / 1e9:,.0f} GB/s\n")
        print(f"{'kernel':75} {'us':>9} {'GB/s':>7} {'bound, us':>9} {'of bound':>8} {'TFLOP/s':>8}")
        for model in MODELS:
            for case in timed(model):
                if time.monotonic() - began > SECONDS_MAX:
                    sys.exit("out of time; the rest was not timed")
                seconds, bound = seconds_of(case.launches()), case.moved_bytes / bandwidth
                print(
                    f"{model + ': ' + case.name:75} {seconds * 1e6:9.1f} {case.moved_bytes / seconds / 1e9:7,.0f} "
                    f"{bound * 1e6:9.1f} {bound / seconds:8.0%}"
                    f"{f' {case.operations / seconds / 1e12:8.1f}' if case.operations else ''}",
                    flush=True,
                )
    print(f"\n{time.monotonic() - began:.0f} s; {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
