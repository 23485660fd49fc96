"""Tests of batch invariance: a row has the same bits whatever is computed with it, at every instruction level."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from trioserve_kernels.native import Engine, WeightMemory, address, int32_array
from trioserve_kernels.structs import (
    DTYPES,
    GGML_FORMATS,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    StepStruct,
    WeightFormat,
    matrix_of,
)

Array = npt.NDArray[Any]
DTYPE_IDS = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    values = np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)
    return values if dtype == "float32" else bfloat16_bits(values)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> Array:
    return np.ascontiguousarray(values.view(np.uint16).reshape(*values.shape, 2)[..., 1])


# --- products -------------------------------------------------------------------------------------------------------

COMPANIES = ((0, 1), (2, 4), (7, 12), (150, 151), (33, 41), (40, 57), (100, 133), (130, 300), (0, 129))
"""First and last row of several products that share the same 300 rows."""


def check_product(
    engine: Engine, x: Array, matrix: MatrixStruct, outputs: int, *, batch_invariant: bool = True
) -> None:
    whole = engine.product(x, matrix, outputs, batch_invariant=batch_invariant)
    for first, end in COMPANIES:
        part = engine.product(np.ascontiguousarray(x[first:end]), matrix, outputs, batch_invariant=batch_invariant)
        assert part.tobytes() == whole[first:end].tobytes(), f"rows {first} to {end - 1}"


@DTYPE_IDS
@pytest.mark.parametrize("outputs, inputs", ((50, 31), (96, 800)))
def test_row_of_a_product_has_the_same_bits_in_any_batch(engine: Engine, dtype: str, outputs: int, inputs: int) -> None:
    library = engine.library
    memory = WeightMemory(library, library.packed_bytes(outputs, inputs, dtype) + 4096)
    packed = memory.take(library.packed_bytes(outputs, inputs, dtype))
    library.pack(random(outputs, inputs, dtype=dtype, seed=1), packed)
    matrix = matrix_of((packed, outputs, inputs, WeightFormat.DENSE))
    check_product(engine, random(300, inputs, dtype=dtype), matrix, outputs)
    memory.close()


@DTYPE_IDS
@pytest.mark.parametrize("block_type", GGML_FORMATS)
def test_row_times_a_quantized_weight_has_the_same_bits_in_any_batch(
    engine: Engine, dtype: str, block_type: str
) -> None:
    outputs, inputs, library = 50, 512, engine.library
    _, format = GGML_FORMATS[block_type]
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    if block_type.endswith("_K") or block_type.startswith("IQ"):
        # Only bytes of the mantissa are random, so that every scale is a finite number.
        blocks = np.random.default_rng(0).integers(0, 48, (outputs, inputs // values * size), dtype=np.uint8)
    else:
        blocks = gguf.quants.quantize(random(outputs, inputs, seed=2), gguf.GGMLQuantizationType[block_type])
    memory = WeightMemory(library, library.quantized_bytes(outputs, inputs, format) + 8192)
    packed = memory.take(library.quantized_bytes(outputs, inputs, format))
    library.pack_blocks(block_type, np.ascontiguousarray(blocks), inputs, packed)
    check_product(engine, random(300, inputs, dtype=dtype), matrix_of((packed, outputs, inputs, format)), outputs)
    memory.close()


def test_amx_computes_few_rows_differently_without_batch_invariance(engine: Engine) -> None:
    if not engine.library.level.startswith("amx"):
        pytest.skip("the other levels have one way")
    memory = WeightMemory(engine.library, engine.library.packed_bytes(96, 800, "bfloat16") + 4096)
    packed = memory.take(engine.library.packed_bytes(96, 800, "bfloat16"))
    engine.library.pack(random(96, 800, dtype="bfloat16", seed=1), packed)
    x, matrix = random(300, 800, dtype="bfloat16"), matrix_of((packed, 96, 800, WeightFormat.DENSE))
    with pytest.raises(AssertionError):
        check_product(engine, x, matrix, 96, batch_invariant=False)
    memory.close()


# --- attention ------------------------------------------------------------------------------------------------------

TOKENS = 420  # Length of each sequence: more than one part, and the last span is not full.

Chunk = tuple[int, int, int]  # Each chunk is its sequence, its start and its number of tokens.


class Sequences:
    """Queries, keys and values of some sequences. The first `shared` blocks are equal in all of them."""

    def __init__(
        self,
        dtype: str,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int = 0,
        shared: int = 0,
        spread: float = 1,
        page_tokens: int = 16,
        has_sinks: bool = False,
        latent_dim: int = 0,
    ) -> None:
        self._latent_dim = latent_dim
        self.dtype, self.heads, self.kv_heads, self.head_dim, self.window = dtype, heads, kv_heads, head_dim, window
        self._page_tokens = page_tokens
        self._sinks = np.random.default_rng(6).normal(0, 3, 64).astype(np.float32) if has_sinks else None
        blocks, count = -(-TOKENS // page_tokens), 5
        self._pages = random(
            count * blocks, page_tokens, 1 if latent_dim else 2, kv_heads, head_dim, dtype=dtype, seed=3
        )
        order = np.random.default_rng(4).permutation(count * blocks)
        self._tables = order.reshape(count, blocks)
        self._tables[:, :shared] = self._tables[0, :shared]
        queries = np.random.default_rng(5).normal(0, spread, (count, TOKENS, heads * head_dim)).astype(np.float32)
        self._queries = queries if dtype == "float32" else bfloat16_bits(queries)

    def attended(self, engine: Engine, chunks: Sequence[Chunk]) -> dict[tuple[int, int], bytes]:
        """Compute chunks in one step, and return the bits of each row, by sequence and position."""
        tables = [self._tables[index, : -(-(start + count) // self._page_tokens)] for index, start, count in chunks]
        counts, starts = [count for _, _, count in chunks], [start for _, start, _ in chunks]
        firsts = np.cumsum([0, *map(len, tables)])[:-1]
        arrays = [int32_array([int(number) for number in numbers]) for numbers in (counts, starts, firsts)]
        blocks = np.concatenate(tables).astype(np.int32)
        layer = LayerStruct(
            head_count=self.heads,
            kv_head_count=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            sinks=None if self._sinks is None else address(self._sinks),
        )
        model = ModelStruct(
            dtype=DTYPES[self.dtype],
            layer_count=1,
            latent_dim=self._latent_dim,
            page_tokens=self._page_tokens,
            batch_invariant=1,
            layers=ctypes.addressof(layer),
        )
        pages = (ctypes.c_void_p * 1)(address(self._pages))
        step = StepStruct(
            row_count=sum(counts),
            chunk_count=len(chunks),
            chunk_counts=arrays[0].buffer_info()[0],
            chunk_starts=arrays[1].buffer_info()[0],
            table_firsts=arrays[2].buffer_info()[0],
            tables=address(blocks),
            pages=ctypes.addressof(pages),
        )
        queries = np.concatenate([self._queries[index, start : start + count] for index, start, count in chunks])
        places = [(index, start + offset) for index, start, count in chunks for offset in range(count)]
        rows = engine.attention(model, step, np.ascontiguousarray(queries))
        return dict(zip(places, (row.tobytes() for row in rows), strict=True))


HISTORIES: dict[str, list[list[Chunk]]] = {
    "decodes alone": [[(0, position, 1)] for position in (0, 63, 64, 127, 128, 129, 255, 300, 419)],
    "short chunks": [[(0, position, 3)] for position in (126, 254, 400)],
    "a prompt in chunks": [[(0, start, count)] for start, count in ((0, 4), (4, 60), (64, 61), (125, 200), (325, 95))],
    "decodes side by side": [[(index, 380 + index, 1) for index in range(5)], [(index, 419, 1) for index in range(5)]],
    "a decode beside prompts": [[(1, 0, 420), (0, 419, 1), (2, 300, 40)], [(0, 0, 300), (1, 260, 1), (3, 129, 2)]],
    "one decode and many": [[(1, 419, 1), (1, 418, 1), (2, 130, 1), (3, 9, 1), (4, 300, 2), (0, 350, 3)]],
}

SHAPES: dict[str, dict[str, Any]] = {
    "9 heads of 64": {"heads": 9, "kv_heads": 3, "head_dim": 64},
    "scores that grow": {"heads": 4, "kv_heads": 1, "head_dim": 32, "spread": 9},
    "48": {"heads": 5, "kv_heads": 1, "head_dim": 48},
    "a window": {"heads": 2, "kv_heads": 2, "head_dim": 64, "window": 150},
    "a narrow window": {"heads": 2, "kv_heads": 1, "head_dim": 96, "window": 21},
    "shared blocks": {"heads": 6, "kv_heads": 2, "head_dim": 128, "shared": 22},
    "no whole part shared": {"heads": 2, "kv_heads": 1, "head_dim": 32, "shared": 7},
    "12 heads of 80 for one of keys": {"heads": 12, "kv_heads": 1, "head_dim": 80},
    "more heads than lanes": {"heads": 20, "kv_heads": 4, "head_dim": 16, "spread": 4},
    "pages of 7": {"heads": 7, "kv_heads": 1, "head_dim": 64, "page_tokens": 7, "shared": 40},
    "sinks": {"heads": 20, "kv_heads": 4, "head_dim": 64, "has_sinks": True, "shared": 12, "spread": 3},
    "sinks and a window": {"heads": 9, "kv_heads": 3, "head_dim": 32, "has_sinks": True, "window": 128},
    "latents": {"heads": 6, "kv_heads": 1, "head_dim": 80, "latent_dim": 64, "shared": 9, "spread": 4},
    "pages of 100 and a window": {"heads": 4, "kv_heads": 2, "head_dim": 80, "page_tokens": 100, "window": 129},
}


@DTYPE_IDS
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_row_has_the_same_bits_in_any_schedule(engine: Engine, dtype: str, shape: str) -> None:
    """Compute rows alone and in batches, as decodes or in prompts, in one or more chunks, with any thread count."""
    sequences = Sequences(dtype, **SHAPES[shape])
    whole: dict[tuple[int, int], bytes] = {}
    for index in range(5):
        whole |= sequences.attended(engine, [(index, 0, TOKENS)])
    others = [engine, *(Engine(engine.library, threads) for threads in (1, 3))]
    for name, steps in HISTORIES.items():
        for number, chunks in enumerate(steps):
            found = sequences.attended(others[number % len(others)], chunks)
            wrong = [place for place, row in found.items() if row != whole[place]]
            assert not wrong, f"{name}: {chunks}"
    for other in others[1:]:
        other.close()
