"""Tests of packing weights: from memory and by the library's own file reading, with equal bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trioserve_kernels.native import Library, Loading, NoNativeKernels, WeightMemory, address, load_library
from trioserve_kernels.structs import BLOCK_FORMATS, DTYPES, FileRowsStruct, RowsKind, WeightFormat

KINDS = {"float32": np.dtype(np.uint32), "bfloat16": np.dtype(np.uint16)}


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture
def memories(library: Library) -> Iterator[list[WeightMemory]]:
    made: list[WeightMemory] = []
    yield made
    for memory in made:
        memory.close()


def bits(*shape: int, dtype: str, seed: int = 0) -> npt.NDArray[Any]:
    values = np.random.default_rng(seed).integers(0, 2**15, shape, dtype=KINDS[dtype])
    return values.view(np.float32) if dtype == "float32" else values


def rows_of(weight: npt.NDArray[Any], **fields: Any) -> FileRowsStruct:
    """Describe the rows of a matrix in a file that `written` wrote."""
    return FileRowsStruct(
        **{
            "offset": 7,
            "rows": len(weight),
            "columns": weight.shape[1],
            "row_bytes": weight[0].nbytes,
            "block_step": 1,
            "counts_as": weight.nbytes,
            **fields,
        }
    )


def written(path: Path, *weights: npt.NDArray[Any]) -> Path:
    path.write_bytes(b"ahead: " + b"".join(weight.tobytes() for weight in weights))
    return path


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("rows, columns", ((16, 32), (33, 70), (48, 47), (5, 3), (64, 1000)))
def test_each_number_of_a_packed_weight_is_at_its_documented_position(
    library: Library, memories: list[WeightMemory], dtype: str, rows: int, columns: int
) -> None:
    """Check the layout: blocks of 16 rows. A unit in a block is one number of every row, or two adjacent numbers."""
    weight = bits(rows, columns, dtype=dtype)
    size = library.packed_bytes(rows, columns, dtype)
    memories.append(WeightMemory(library, size))
    place = memories[-1].take(size)
    library.pack(weight, place)
    depth = 2 if dtype == "bfloat16" else 1
    padded = np.zeros((-(-rows // 16) * 16, -(-columns // 32) * 32), dtype=weight.dtype)
    padded[:rows, :columns] = weight
    expected = padded.reshape(-1, 16, padded.shape[1] // depth, depth).swapaxes(1, 2)
    assert ctypes.string_at(place, size) == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_rows_from_a_file_and_from_memory_are_packed_equally(
    library: Library, memories: list[WeightMemory], dtype: str, tmp_path: Path
) -> None:
    """Interleave the blocks of two matrices. Each is larger than one read, and the second one comes in two parts."""
    gate, up = bits(160, 3000, dtype=dtype, seed=1), bits(160, 3000, dtype=dtype, seed=2)
    size = library.packed_bytes(320, 3000, dtype)
    memories.extend(WeightMemory(library, size) for _ in range(2))
    expected, place = (memory.take(size) for memory in memories)
    library.pack(gate, expected, first_block=0, block_step=2)
    library.pack(up, expected, first_block=1, block_step=2)
    path = written(tmp_path / "weights", gate, up)
    common = {"to": place, "block_step": 2, "kind": RowsKind.DENSE, "type": DTYPES[dtype]}
    loading = Loading(
        library,
        [path],
        [
            rows_of(gate, **common),
            rows_of(up[:96], offset=7 + gate.nbytes, first_block=1, **common),
            rows_of(up[96:], offset=7 + gate.nbytes + up[:96].nbytes, first_block=13, **common),
        ],
    )
    loading.run()
    assert ctypes.string_at(place, size) == ctypes.string_at(expected, size)
    assert loading.bytes_done == gate.nbytes + up.nbytes


@pytest.mark.parametrize("head_dim", (32, 64, 128))
def test_halves_of_heads_are_interleaved(
    library: Library, memories: list[WeightMemory], head_dim: int, tmp_path: Path
) -> None:
    weight = bits(256, 2000, dtype="bfloat16")
    size = library.packed_bytes(256, 2000, "bfloat16")
    memories.extend(WeightMemory(library, size) for _ in range(2))
    expected, place = (memory.take(size) for memory in memories)
    halves = weight.reshape(-1, 2, head_dim // 32, 16, 2000).swapaxes(1, 2)
    library.pack(np.ascontiguousarray(halves).reshape(256, 2000), expected)
    path = written(tmp_path / "weights", weight)
    rows = rows_of(weight, to=place, kind=RowsKind.DENSE, type=DTYPES["bfloat16"], pairs_of=head_dim)
    Loading(library, [path], [rows]).run()
    assert ctypes.string_at(place, size) == ctypes.string_at(expected, size)


def test_blocks_from_a_file_and_from_memory_are_packed_equally(
    library: Library, memories: list[WeightMemory], tmp_path: Path
) -> None:
    number, format = BLOCK_FORMATS["Q4_0"]
    assert format == WeightFormat.Q4
    columns = 9600
    blocks = np.random.default_rng(0).integers(0, 120, (96, columns // 32 * 18), dtype=np.uint8)
    size = library.quantized_bytes(96, columns, format)
    memories.extend(WeightMemory(library, size) for _ in range(2))
    expected, place = (memory.take(size) for memory in memories)
    library.pack_blocks("Q4_0", blocks, columns, expected)
    path = written(tmp_path / "weights", blocks)
    rows = rows_of(blocks, columns=columns, to=place, kind=RowsKind.BLOCKS, type=number)
    Loading(library, [path], [rows]).run()
    assert ctypes.string_at(place, size) == ctypes.string_at(expected, size)


def test_copied_rows_of_a_file_are_not_repacked(library: Library, tmp_path: Path) -> None:
    first, second = bits(30, 40, dtype="bfloat16"), bits(20, 40, dtype="bfloat16", seed=1)
    paths = [written(tmp_path / name, weight) for name, weight in (("a", first), ("b", second))]
    place = np.zeros((50, 40), dtype=np.uint16)
    rows = [
        rows_of(first, to=address(place)),
        rows_of(second, to=address(place[30:]), file=1),
    ]
    Loading(library, paths, rows).run()
    assert (place == np.concatenate((first, second))).all()


def test_truncated_and_missing_weight_files_are_reported(library: Library, tmp_path: Path) -> None:
    weight = bits(30, 40, dtype="bfloat16")
    path = written(tmp_path / "short", weight[:29])
    place = np.zeros((30, 40), dtype=np.uint16)
    loading = Loading(library, [path], [rows_of(weight, to=address(place))] * 3)
    with pytest.raises(EOFError, match="short"):
        loading.run()
    assert loading.bytes_done == 0
    loading.run()  # Another thread stops at once.
    with pytest.raises(FileNotFoundError):
        Loading(library, [tmp_path / "gone"], []).run()


def test_read_error_of_the_system_is_raised(library: Library, tmp_path: Path) -> None:
    weight = bits(30, 40, dtype="bfloat16")
    rows = rows_of(weight, to=0)  # This destination address is invalid.
    path = written(tmp_path / "weights", weight)
    with pytest.raises(OSError, match="Bad address") as caught:
        Loading(library, [path], [rows]).run()
    assert caught.value.filename == str(path)


def test_no_row_of_a_weight_is_read_after_stop(library: Library, tmp_path: Path) -> None:
    weight = bits(30, 40, dtype="bfloat16")
    place = np.zeros((30, 40), dtype=np.uint16)
    path = written(tmp_path / "weights", weight)
    loading = Loading(library, [path], list(itertools.repeat(rows_of(weight, to=address(place)), 3)))
    loading.stop()
    loading.run()
    assert not place.any()
