"""Compiles every Triton kernel for a GPU that need not be present: `python -m trioserve_kernels.compile_check`.

The check calls the kernels' functions with CPU tensors. A replacement for Triton's driver only reports the type of the
GPU. Therefore, strides, alignments, constants and stages are those of a real launch. The check finds errors of types,
layouts, shared memory and registers. It does not check results. Triton's cache keeps what was compiled, so a kernel is
compiled again only after a change. `--table` compiles the kernels of attention, sampling and 4-bit products, whose
registers and shared memory are in a table of README.md. `--write` writes this table, with a process for each GPU, and
keeps the columns of all other GPUs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trioserve_kernels.kv_format import SCALE_BYTES
from trioserve_kernels.paged import DecodeWork

__all__ = ["SHARED_BYTES_MAX", "main", "read_table"]

# Bytes of shared memory per program, by compute capability (CUDA programming guide).
SHARED_BYTES_MAX = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
README = Path(__file__).with_name("README.md")
TABLE_BEGIN, TABLE_END = "<!-- compile_check: begin -->\n", "<!-- compile_check: end -->\n"
# Each shape has head_dim, query heads, key/value heads, dtype, and dtype of the pages. The first ones are in the table.
ATTENTION_SHAPES = (
    (64, 9, 3, torch.bfloat16, torch.bfloat16),
    (128, 32, 8, torch.bfloat16, torch.bfloat16),
    (256, 8, 4, torch.bfloat16, torch.bfloat16),
    (128, 32, 8, torch.bfloat16, torch.float8_e4m3fn),
    (256, 8, 4, torch.float32, torch.float32),
    (80, 32, 32, torch.bfloat16, torch.bfloat16),
    (96, 32, 8, torch.bfloat16, torch.bfloat16),
    (128, 32, 8, torch.float16, torch.float16),
    (128, 32, 8, torch.float32, torch.float32),
)
TABLE_SHAPES = 5
# Name, values of a group, dtype of scales, and True if groups have minimums.
FOUR_BIT_FORMATS = (
    ("4 bits, groups of 128", 128, torch.float32, True),
    ("4 bits, groups of 64", 64, torch.float32, True),
    ("4 bits, groups of 32", 32, torch.float16, False),
    ("MXFP4", 32, torch.uint8, False),
)
LATENT_HEADS = (16, 20, 128)  # heads that share latents of 512 numbers
# Rows of the first size are unaligned. Rows of the second size are aligned and allow wider loads.
VOCAB_SIZES = (50_257, 128_256)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Result of compiling one launch.

    Attributes:
        kernel: name of the kernel's function.
        case: description of the arguments.
        registers: registers per thread.
        spilled_bytes: memory per thread for values that do not fit into registers.
        shared_bytes: shared memory per program.
        seconds: time to compile.
    """

    kernel: str
    case: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    seconds: float

    @property
    def cell(self) -> str:
        spilled = f", {self.spilled_bytes} spilled" if self.spilled_bytes else ""
        return f"{self.registers}, {self.shared_bytes / 1024:.1f} KiB{spilled}"


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


def _attention(
    kernels: Any, head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, page_dtype: torch.dtype
) -> None:
    rows, width = 5, 3
    qkv = torch.zeros(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    queries = qkv[:, : heads * head_dim]
    attended = torch.zeros(rows, heads * head_dim, dtype=dtype)
    page_dim = head_dim if page_dtype == dtype else head_dim + SCALE_BYTES
    pages = torch.zeros(4, 16, 2, kv_heads, page_dim, dtype=page_dtype)
    angles = torch.zeros(rows, 1, head_dim, dtype=dtype)
    slots = torch.zeros(rows, dtype=torch.int64)
    tables, contexts = torch.zeros(rows, width, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    norm = torch.zeros((heads + kv_heads) * head_dim, dtype=dtype), 1e-5
    kernels.rotary_and_store_kv_(qkv, angles, angles, pages.view(64, -1), slots, kv_heads)
    kernels.rotary_and_store_kv_(qkv, angles, angles, pages.view(64, -1), slots, kv_heads, norm)
    work = DecodeWork.make(rows, heads, 2, head_dim, pages.device)
    kernels.paged_decode_(attended, queries, pages, tables, contexts, None, 2, work)
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


def _four_bits(
    kernels: Any, dtype: torch.dtype, rows: int, group: int, scale_dtype: torch.dtype, has_min: bool
) -> None:
    from trioserve_kernels.four_bits import FourBitWeight

    codes, scales = torch.zeros(6144, 2048, dtype=torch.uint8), torch.zeros(6144, 4096 // group, dtype=scale_dtype)
    weight = FourBitWeight(codes, scales, scales if has_min else None)
    kernels.four_bit_linear(torch.zeros(rows, 4096, dtype=dtype), weight, torch.zeros(6144, dtype=dtype))


def _mixtures(kernels: Any, dtype: torch.dtype) -> None:
    from trioserve_kernels.four_bits import FourBitWeight
    from trioserve_kernels.triton.product import grouped_product

    ends = torch.zeros(128, dtype=torch.int32)
    weight, bias = torch.zeros(128, 1536, 2048, dtype=dtype), torch.zeros(128, 1536, dtype=dtype)
    codes, scales = torch.zeros(128 * 1536, 1024, dtype=torch.uint8), torch.zeros(128 * 1536, 16)
    exponents = torch.zeros(128 * 1536, 64, dtype=torch.uint8)
    for rows in (8, 8_192):
        values = torch.zeros(rows, 2048, dtype=dtype)
        grouped_product(values, weight, ends, None)
        kernels.grouped_linear(values, weight, ends, bias)
        kernels.grouped_linear(values, FourBitWeight(codes, scales, scales), ends, None)
        kernels.grouped_linear(values, FourBitWeight(codes, exponents, None), ends, bias)
    kernels.weighted_sum(torch.zeros(5, 8, 2048, dtype=dtype), torch.zeros(5, 8))


def _rows(kernels: Any, dtype: torch.dtype) -> None:
    hidden = torch.zeros(5, 4096, dtype=dtype)
    kernels.add_rms_norm_(hidden, hidden.clone(), hidden[0], 1e-5)
    kernels.add_rms_norm_(hidden, None, hidden[0], 1e-5)
    kernels.rms_norm(hidden.view(5, 32, 128)[:, :9], None, 1e-5)
    kernels.activate_and_mul(hidden)
    kernels.fp8_rows(hidden)
    kernels.activate(hidden, "relu2")


def _sampling(kernels: Any, dtype: torch.dtype, vocab_size: int) -> None:
    scores = torch.zeros(5, vocab_size, dtype=dtype)
    parameters, words = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    kernels.choose_tokens(scores, parameters, words)
    bits = torch.zeros(3, (vocab_size + 31) // 32, dtype=torch.int32)
    kernels.choose_tokens(scores, parameters, words, (bits, torch.zeros(5, dtype=torch.int32)))


def _registers(cubin: bytes) -> tuple[int, int]:
    """Return the registers, and the bytes of the stack, of the only kernel of a compiled file."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _compile(arch: int, is_table: bool, chosen: str = "") -> list[Compiled]:
    """Compile kernels for a GPU. The process cannot launch a Triton kernel afterwards.

    Args:
        arch: compute capability without its dot.
        is_table: True for the launches of the table only.
        chosen: text that the description of a launch must contain.
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from trioserve_kernels import triton as kernels
    from trioserve_kernels.triton import attention, four_bit_product

    launch = JITFunction.run
    found: list[Compiled] = []

    def compile_only(self: Any, case: str, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        compiled = launch(self, *args, **options | {"warmup": True})
        seconds = time.perf_counter() - began
        case += ", masks" if options.get("HAS_MASKS") else ""
        case += ", norms" if options.get("HAS_NORM") else ""
        sizes = (*_registers(compiled.asm["cubin"]), compiled.metadata.shared, seconds)
        found.append(Compiled(self.__name__, case, *sizes))

    def check(case: str, launches: Callable[..., None], *shape: Any) -> None:
        if chosen in case:
            JITFunction.run = functools.partialmethod(compile_only, case)
            launches(kernels, *shape)

    # The driver and the patched function are not restored, because the process does nothing else.
    driver.set_active(_NoDevice(arch))
    attention.shared_bytes_max = lambda device: SHARED_BYTES_MAX[arch]  # type: ignore[assignment]  # it has a cache
    # The check compiles 4-bit products with few rows as a GPU runs them: several programs divide the depth.
    four_bit_product._splits = lambda values, outputs: 4
    for head_dim, heads, kv_heads, dtype, page_dtype in ATTENTION_SHAPES[: TABLE_SHAPES if is_table else None]:
        pages = "" if page_dtype == dtype else f", KV in {_name(page_dtype)}"
        case = f"heads of {head_dim}, {heads}/{kv_heads}, {_name(dtype)}{pages}"
        check(case, _attention, head_dim, heads, kv_heads, dtype, page_dtype)
    for vocab_size in VOCAB_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            if not is_table or (vocab_size, dtype) == (VOCAB_SIZES[-1], torch.bfloat16):
                check(f"{vocab_size} tokens, {_name(dtype)}", _sampling, dtype, vocab_size)
    if is_table:
        for rows in (5, 500):
            for name, group, scale_dtype, has_min in FOUR_BIT_FORMATS:
                check(f"{name}, {rows} rows, bfloat16", _four_bits, torch.bfloat16, rows, group, scale_dtype, has_min)
        return found
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(_name(dtype), _rows, dtype)
        check(_name(dtype), _products, dtype)
        for rows in (5, 500):
            for name, group, scale_dtype, has_min in FOUR_BIT_FORMATS:
                check(f"{name}, {rows} rows, {_name(dtype)}", _four_bits, dtype, rows, group, scale_dtype, has_min)
        check(f"128 experts, {_name(dtype)}", _mixtures, dtype)
    for heads in LATENT_HEADS:
        check(f"{heads} heads of latents, bfloat16", _latents, heads, torch.bfloat16)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_table() -> tuple[str, dict[tuple[str, str, int], str]]:
    """Read the table of README.md.

    Returns:
        The version of triton that compiled it, and the text of each cell by kernel, case and compute capability. Empty
        cells are left out.
    """
    text = README.read_text(encoding="utf-8").split(TABLE_BEGIN)[1].split(TABLE_END)[0]
    version = re.search(r"triton ([\d.]+)", text)
    assert version is not None, "the table does not name a version of triton"
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in text.splitlines() if "|" in line]
    archs = [int(name.removeprefix("sm_")) for name in rows[0][2:]]
    cells = {}
    for kernel, case, *row in rows[2:]:
        cells.update({(kernel.strip("`"), case, arch): cell for arch, cell in zip(archs, row, strict=True) if cell})
    return version[1], cells


def _write_table(archs: Sequence[int], case: str) -> None:
    """Compile launches for some GPUs, and write their cells into the table. All other cells are kept."""
    _, cells = read_table()
    columns = sorted({*archs, *(arch for _, _, arch in cells)})
    for arch in archs:
        command = (sys.executable, "-m", "trioserve_kernels.compile_check", "--table", "--arch", str(arch))
        output = subprocess.run((*command, "--case", case), check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in output.splitlines():
            kernel, compiled_case, cell = line.split(" | ")
            cells[kernel, compiled_case, arch] = cell
    rows: dict[tuple[str, str], list[str]] = {}
    for kernel, compiled_case, _ in cells:
        rows[kernel, compiled_case] = [cells.get((kernel, compiled_case, arch), "") for arch in columns]
    lines = [
        f"Compiled by triton {importlib.metadata.version('triton')}. A cell has registers and shared memory.",
        "",
        "| " + " | ".join(("kernel", "arguments", *(f"sm_{arch}" for arch in columns))) + " |",
        "| " + " | ".join(["---"] * (2 + len(columns))) + " |",
        *(f"| `{kernel}` | {case} | {' | '.join(cells)} |" for (kernel, case), cells in rows.items()),
    ]
    before, _, rest = README.read_text(encoding="utf-8").partition(TABLE_BEGIN)
    after = rest.partition(TABLE_END)[2]
    README.write_text(before + TABLE_BEGIN + "\n" + "\n".join(lines) + "\n\n" + TABLE_END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trioserve_kernels.compile_check", description=__doc__)
    parser.add_argument(
        "--arch", type=int, default=90, choices=SHARED_BYTES_MAX, help="compute capability, without its dot"
    )
    parser.add_argument("--table", action="store_true", help="compile and print the launches of the table only")
    parser.add_argument(
        "--write", type=int, nargs="*", metavar="ARCH", help="write the table in README.md, for all GPUs or these"
    )
    parser.add_argument("--case", default="", metavar="TEXT", help="only launches whose description contains TEXT")
    chosen = parser.parse_args()
    if chosen.write is not None:
        _write_table(chosen.write or tuple(SHARED_BYTES_MAX), chosen.case)
        return
    found = _compile(chosen.arch, chosen.table, chosen.case)
    for one in found:
        if chosen.table:
            print(f"{one.kernel} | {one.case} | {one.cell}")
        else:
            print(f"{one.kernel:22} {one.case:45} {one.cell:30} {one.seconds:6.2f} s")
        assert one.shared_bytes <= SHARED_BYTES_MAX[chosen.arch], f"{one.kernel} needs too much shared memory"
        if chosen.table and "float32" not in one.case:
            assert not one.spilled_bytes, f"{one.kernel} spills registers: {one.case}, {one.cell}"
    if not chosen.table:
        print(f"{len(found)} launches compiled for sm_{chosen.arch}")


if __name__ == "__main__":
    main()
