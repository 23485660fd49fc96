"""Compiles every Triton kernel for a GPU that need not be present: `python -m trioserve_kernels.compile_check`.

The check calls the kernels' functions with CPU tensors. A replacement for Triton's driver only reports the type of the
GPU. Therefore, strides, alignments, constants and stages are those of a real launch. The check finds errors of types,
layouts and shared memory. It does not check results.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from trioserve_kernels.paged import DecodeWork

__all__ = ["main"]

# Bytes of shared memory per program, by compute capability (CUDA programming guide). Other GPUs get the smallest limit.
SHARED_BYTES_MAX = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
# Each shape has head_dim, query heads, key/value heads and dtype.
ATTENTION_SHAPES = (
    (64, 9, 3, torch.bfloat16),
    (80, 32, 32, torch.bfloat16),
    (96, 32, 8, torch.bfloat16),
    (128, 32, 4, torch.bfloat16),
    (128, 32, 8, torch.float16),
    (128, 32, 8, torch.float32),
    (256, 8, 4, torch.bfloat16),
)
LATENT_HEADS = (16, 20, 128)  # heads that share latents of 512 numbers
# Rows of the first size are unaligned. Rows of the second size are aligned and allow wider loads.
VOCAB_SIZES = (50_257, 128_256)


class _NoDevice:
    """Replacement for a Triton driver, with the methods that a launch uses."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _attention(kernels: Any, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    rows, width = 5, 3
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    queries = qkv[:, : heads * head_dim]
    attended = torch.zeros(rows, heads * head_dim, dtype=dtype)
    pages = torch.zeros(4, 16, 2, kv_heads, head_dim, dtype=dtype)
    angles = torch.zeros(rows, 1, head_dim, dtype=dtype)
    slots = torch.zeros(rows, dtype=torch.int64)
    tables, contexts = torch.zeros(rows, width, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    kernels.rotary_and_store_kv_(qkv, angles, angles, pages.view(64, -1), slots, kv_heads)
    for parts in (1, 2):
        work = DecodeWork.make(rows, heads, parts, head_dim, pages.device)
        kernels.paged_decode_(attended, queries, pages, tables, contexts, None, parts, work)
    tiles = torch.zeros(7, 2, dtype=torch.int32)
    kernels.paged_chunks_(attended, queries, pages, tables, contexts, contexts, tiles, None)


def _latents(kernels: Any, heads: int, dtype: torch.dtype) -> None:
    rows, latent_dim, entry_dim = 5, 512, 576
    queries, attended = torch.zeros(rows, heads * entry_dim, dtype=dtype), torch.zeros(rows, heads * 512, dtype=dtype)
    pages = torch.zeros(4, 16, 1, 1, entry_dim, dtype=dtype)
    tables, contexts = torch.zeros(rows, 3, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for parts in (1, 2):
        work = DecodeWork.make(rows, heads, parts, latent_dim, pages.device)
        kernels.paged_latents_(attended, queries, pages, tables, contexts, latent_dim, parts=parts, work=work)
    tiles = torch.zeros(7, 2, dtype=torch.int32)
    kernels.paged_latents_(attended, queries, pages, tables, contexts, latent_dim, contexts, tiles)


def _products(kernels: Any, dtype: torch.dtype) -> None:
    from trioserve_kernels.triton.product import product

    values, weight = torch.zeros(5, 4096, dtype=dtype), torch.zeros(6144, 4096, dtype=dtype)
    product(values, weight, None)
    product(values, weight, weight[0, :1].expand(6144).contiguous())
    product(values[:, :576].contiguous(), weight[:49152, :576].contiguous(), None)


def _four_bits(kernels: Any, dtype: torch.dtype) -> None:
    from trioserve_kernels.four_bits import FourBitWeight
    from trioserve_kernels.triton.four_bit_product import four_bit_product

    codes = torch.zeros(6144, 2048, dtype=torch.uint8)
    for group, scale_dtype, has_min in (
        (128, torch.float32, True),
        (32, torch.float16, False),
        (64, torch.float32, True),
    ):
        scales = torch.zeros(6144, 4096 // group, dtype=scale_dtype)
        weight = FourBitWeight(codes, scales, scales if has_min else None)
        for rows in (5, 500):
            four_bit_product(torch.zeros(rows, 4096, dtype=dtype), weight, torch.zeros(6144, dtype=dtype))


def _mixtures(kernels: Any, dtype: torch.dtype) -> None:
    from trioserve_kernels.four_bits import FourBitWeight
    from trioserve_kernels.triton.product import grouped_product

    ends = torch.zeros(128, dtype=torch.int32)
    weight, bias = torch.zeros(128, 1536, 2048, dtype=dtype), torch.zeros(128, 1536, dtype=dtype)
    codes, scales = torch.zeros(128 * 1536, 1024, dtype=torch.uint8), torch.zeros(128 * 1536, 16)
    for rows in (8, 8_192):
        values = torch.zeros(rows, 2048, dtype=dtype)
        grouped_product(values, weight, ends, None)
        kernels.grouped_linear(values, weight, ends, bias)
        kernels.grouped_linear(values, FourBitWeight(codes, scales, scales), ends, None)
    kernels.weighted_sum(torch.zeros(5, 8, 2048, dtype=dtype), torch.zeros(5, 8))


def _rows(kernels: Any, dtype: torch.dtype) -> None:
    hidden = torch.zeros(5, 4096, dtype=dtype)
    kernels.add_rms_norm_(hidden, hidden.clone(), hidden[0], 1e-5)
    kernels.add_rms_norm_(hidden, None, hidden[0], 1e-5)
    kernels.rms_norm(hidden.view(5, 32, 128)[:, :9], None, 1e-5)
    kernels.activate_and_mul(hidden)


def _sampling(kernels: Any, dtype: torch.dtype, vocab_size: int) -> None:
    scores = torch.zeros(5, vocab_size, dtype=dtype)
    parameters, words = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    kernels.choose_tokens(scores, parameters, words)
    bits = torch.zeros(3, (vocab_size + 31) // 32, dtype=torch.int32)
    kernels.choose_tokens(scores, parameters, words, (bits, torch.zeros(5, dtype=torch.int32)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trioserve_kernels.compile_check", description=__doc__)
    parser.add_argument("--arch", type=int, default=90, help="compute capability without its dot (default: 90)")
    arch: int = parser.parse_args().arch
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from trioserve_kernels import triton as kernels
    from trioserve_kernels.triton import attention

    launch = JITFunction.run
    found: list[tuple[str, str, int, float]] = []

    def compile_only(self: Any, case: str, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        compiled = launch(self, *args, **options | {"warmup": True})
        found.append((case, self.__name__, compiled.metadata.shared, time.perf_counter() - began))

    def check(case: str, launches: Callable[..., None], *shape: Any) -> None:
        JITFunction.run = functools.partialmethod(compile_only, case)
        launches(kernels, *shape)

    shared_bytes_max = SHARED_BYTES_MAX.get(arch, SHARED_BYTES_MAX[86])
    # The driver and the patched function are not restored, because this process does nothing else.
    driver.set_active(_NoDevice(arch))
    attention.shared_bytes_max = lambda device: shared_bytes_max  # type: ignore[assignment]  # the original has a cache
    for head_dim, heads, kv_heads, dtype in ATTENTION_SHAPES:
        name = f"head_dim {head_dim}, heads {heads}/{kv_heads}, {dtype}"
        check(name, _attention, head_dim, heads, kv_heads, dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(str(dtype), _rows, dtype)
        check(str(dtype), _products, dtype)
        check(f"4 bits, {dtype}", _four_bits, dtype)
        check(f"128 experts, {dtype}", _mixtures, dtype)
    for heads in LATENT_HEADS:
        check(f"{heads} heads of latents", _latents, heads, torch.bfloat16)
    for vocab_size in VOCAB_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            check(f"{vocab_size} tokens, {dtype}", _sampling, dtype, vocab_size)
    for case, name, shared_bytes, seconds in found:
        print(f"{name:22} {case:45} shared memory {shared_bytes:7,} bytes {seconds:6.2f} s")
        assert shared_bytes <= shared_bytes_max, f"{name} needs too much shared memory"
    print(f"{len(found)} launches compiled for sm_{arch}")


if __name__ == "__main__":
    main()
