"""Python interface of the native CPU library (cpu/, compiled by build.py): its functions and compute threads.

Calls go through ctypes, which releases the GIL while a call runs. Arrays are numpy arrays, passed by address. numpy has
no bfloat16, so such values are stored as their 16 bits in a uint16. torch is not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trioserve_kernels.build import CannotBuild, build_library, supported_levels
from trioserve_kernels.structs import (
    BLOCK_FORMATS,
    DTYPES,
    FileRowsStruct,
    LayerStruct,
    LoadingStruct,
    MatrixStruct,
    ModelStruct,
    StepStruct,
    WeightFormat,
)

__all__ = [
    "FLAW_NOTHING_ALLOWED",
    "FLAW_NOTHING_LEFT",
    "FLAW_NOT_FINITE",
    "NO_FLAW",
    "Engine",
    "Library",
    "Loading",
    "NoNativeKernels",
    "WeightMemory",
    "address",
    "empty_array",
    "load_library",
]

_ARRAY_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
}
FINISHED, ABANDONED = 0, 1
FILE_ENDED = -1
CACHE_LINE_BYTES = 64
NO_FLAW, FLAW_NOT_FINITE, FLAW_NOTHING_LEFT, FLAW_NOTHING_ALLOWED = 0, 1, 2, 3  # numbers of Flaw in cpu/sampling.h

_pointer, _int = ctypes.c_void_p, ctypes.c_int32

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


class NoNativeKernels(Exception):
    """The native kernels are not available. The message contains the reason."""


class Library:
    """The loaded library.

    Args:
        path: the shared object.
        level: instructions that the library uses, a name in build.LEVELS.

    Raises:
        NoNativeKernels: the library cannot be loaded, or the system does not allow its instructions.
    """

    def __init__(self, path: Path, level: str) -> None:
        try:
            functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NoNativeKernels(f"{path} cannot be loaded: {error}") from None
        self.level = level
        self._prepare = functions.trioserve_prepare
        self.make_engine = _declared(functions.trioserve_make_engine, _pointer, _int)
        self.close_engine = _declared(functions.trioserve_close_engine, None, _pointer)
        self.allocate = _declared(functions.trioserve_allocate, _pointer, ctypes.c_int64)
        self.release = _declared(functions.trioserve_release, None, _pointer, ctypes.c_int64)
        self._use_large_pages = _declared(functions.trioserve_use_large_pages, None, _pointer, ctypes.c_int64)
        self.claim = _declared(functions.trioserve_claim, _int, _pointer, ctypes.c_int64)
        self._packed_count = _declared(functions.trioserve_packed_count, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._pack = _declared(
            functions.trioserve_pack, None, _int, _pointer, *[ctypes.c_int64] * 2, _pointer, *[ctypes.c_int64] * 2
        )
        self.load_files = _declared(functions.trioserve_load_files, ctypes.c_int64, *[_pointer] * 3)
        self.step = _declared(functions.trioserve_step, _int, _pointer, _pointer, _pointer)
        self.logprobs = _declared(
            functions.trioserve_logprobs,
            _int,
            *[_pointer] * 3,
            ctypes.c_int64,
            _pointer,
            _int,
            *[_pointer] * 2,
        )
        self.product = _declared(
            functions.trioserve_product, None, _pointer, *[_int] * 2, *[_pointer, ctypes.c_int64] * 2, _pointer
        )
        self._quantized_bytes = _declared(
            functions.trioserve_quantized_bytes, ctypes.c_int64, _int, *[ctypes.c_int64] * 2
        )
        self._pack_blocks, self._pack_values = (
            _declared(function, None, _int, _pointer, *[ctypes.c_int64] * 2, _pointer, *[ctypes.c_int64] * 2)
            for function in (functions.trioserve_pack_blocks, functions.trioserve_pack_values)
        )
        self._dequantize = _declared(
            functions.trioserve_dequantize, None, _int, _pointer, *[ctypes.c_int64] * 2, _pointer
        )
        self.attention = _declared(functions.trioserve_attention, None, *[_pointer] * 5)
        self.sampling = _declared(functions.trioserve_sampling, None, _pointer, _pointer, ctypes.c_int64, _pointer)
        self.shared_memory_bytes = _declared(functions.trioserve_shared_memory_bytes, ctypes.c_int64, _int)
        self.join_shared_memory = _declared(functions.trioserve_join_shared_memory, _pointer, _pointer, *[_int] * 2)
        self.leave_shared_memory = _declared(functions.trioserve_leave_shared_memory, None, _pointer)
        self.shared_collectives = _declared(functions.trioserve_shared_collectives, _pointer, _pointer)
        self.shared_sum = _declared(
            functions.trioserve_shared_sum, _int, _pointer, _int, _pointer, ctypes.c_int64, _int
        )
        self.shared_seconds = _declared(functions.trioserve_shared_seconds, ctypes.c_double, _pointer)
        self.shared_gather = _declared(
            functions.trioserve_shared_gather, None, _pointer, _pointer, ctypes.c_int64, _pointer
        )
        if self._prepare() != 0:
            raise NoNativeKernels(f"the system does not allow the instructions of {level}")

    def packed_bytes(self, rows: int, columns: int, dtype: str) -> int:
        """Return the size in bytes of a packed matrix.

        Args:
            rows: output channels.
            columns: input channels.
            dtype: "float32" or "bfloat16".
        """
        return self._packed_count(rows, columns) * _ARRAY_TYPES[dtype].itemsize

    def pack(self, weight: Array, packed: int, *, first_block: int = 0, block_step: int = 1) -> None:
        """Pack a matrix. Several threads may pack different rows of a matrix at the same time.

        Args:
            weight: contiguous [rows, columns], float32 or bfloat16.
            packed: address of the packed matrix.
            first_block: first destination block. A block has 16 rows, see cpu/product.h.
            block_step: distance between two destination blocks.
        """
        self._pack(_dtype_number(weight), address(weight), *weight.shape, packed, first_block, block_step)

    def quantized_bytes(self, rows: int, columns: int, format: WeightFormat) -> int:
        """Return the size in bytes of a quantized matrix.

        Args:
            rows: output channels.
            columns: input channels.
            format: storage format.
        """
        return self._quantized_bytes(format, rows, columns)

    def pack_blocks(
        self,
        storage_name: str,
        blocks: npt.NDArray[np.uint8],
        columns: int,
        packed: int,
        *,
        first_block: int = 0,
        block_step: int = 1,
    ) -> None:
        """Pack quantized blocks of a file without loss, into the format that BLOCK_FORMATS names.

        Args:
            storage_name: block type, a key of BLOCK_FORMATS.
            blocks: uint8 [rows, bytes of a row].
            columns: input channels.
            packed: address of the packed matrix.
            first_block: first destination block, see `pack`.
            block_step: distance between two destination blocks.
        """
        number, _ = BLOCK_FORMATS[storage_name]
        self._pack_blocks(number, address(blocks), len(blocks), columns, packed, first_block, block_step)

    def pack_values(
        self,
        format: WeightFormat,
        values: npt.NDArray[np.float32],
        packed: int,
        *,
        first_block: int = 0,
        block_step: int = 1,
    ) -> None:
        """Quantize and pack a matrix.

        Args:
            format: Q8 or Q4_MIN.
            values: float32 [rows, columns].
            packed: address of the packed matrix.
            first_block: first destination block, see `pack`.
            block_step: distance between two destination blocks.
        """
        assert format in (WeightFormat.Q8, WeightFormat.Q4_MIN)
        self._pack_values(format, address(values), *values.shape, packed, first_block, block_step)

    def dequantized(self, format: WeightFormat, packed: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Convert a quantized matrix to float32.

        Args:
            format: storage format.
            packed: address of the matrix.
            rows: output channels.
            columns: input channels.

        Returns:
            float32 [rows, columns].
        """
        values = np.empty((rows, columns), dtype=np.float32)
        self._dequantize(format, packed, rows, columns, address(values))
        return values

    def use_large_pages(self, array: Array) -> None:
        """Ask the operating system to use large pages for an array.

        Args:
            array: memory to which no data was written yet.
        """
        self._use_large_pages(address(array), array.nbytes)


class Loading:
    """Reads rows of files into weights. Each thread that calls `run` takes part in the work.

    `run` releases the GIL for all of its work, so threads that hold the GIL do not slow it down.

    Args:
        library: the native library.
        paths: the files.
        rows: rows to read, in reading order. The field `file` is an index of `paths`. The destination memory must stay
            valid until every call of `run` has ended.
    """

    def __init__(self, library: Library, paths: Sequence[Path], rows: Sequence[FileRowsStruct]) -> None:
        self._library = library
        self._paths = paths
        self._rows = (FileRowsStruct * len(rows))(*rows)
        self._struct = LoadingStruct(rows=ctypes.addressof(self._rows), count=len(rows))

    def run(self) -> None:
        """Work until all rows are read or being read by other threads.

        Raises:
            OSError: a file cannot be read. The error contains the path, and all other threads stop.
            EOFError: a file is too short. The error contains the path, and all other threads stop.
        """
        with contextlib.ExitStack() as scopes:
            files = int32_array(scopes.enter_context(path.open("rb", buffering=0)).fileno() for path in self._paths)
            error = _int()
            failed = self._library.load_files(ctypes.addressof(self._struct), start_of(files), ctypes.addressof(error))
        if failed >= 0:
            path = str(self._paths[self._rows[failed].file])
            if error.value == FILE_ENDED:
                raise EOFError(path)
            raise OSError(error.value, os.strerror(error.value), path)

    def stop(self) -> None:
        """Skip all rows that no thread reads yet. Any thread may call this method."""
        self._struct.is_stopped = 1

    @property
    def bytes_done(self) -> int:
        """Progress of reading: the sum of the field `counts_as` of all rows that have been read."""
        return int(self._struct.bytes_done)


class WeightMemory:
    """One range of zeroed memory for weights. `take` allocates pieces of this range.

    The owner closes the object once, when no step uses the weights any more.

    Args:
        library: the native library.
        byte_count: size of the memory.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(self, library: Library, byte_count: int) -> None:
        self._library = library
        self._byte_count = byte_count
        self._start: int | None = library.allocate(byte_count)
        if self._start is None:
            raise MemoryError(f"no memory for {byte_count} bytes of weights")
        self._taken = 0

    def take(self, byte_count: int) -> int:
        """Return the address of the next free piece.

        Args:
            byte_count: size of the piece, a multiple of 64.
        """
        assert self._start is not None, "take after close"
        first = self._start + self._taken
        self._taken += byte_count
        assert self._taken <= self._byte_count, "more weights than were counted"
        return first

    def close(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            self._library.release(start, self._byte_count)

    def __del__(self) -> None:
        if hasattr(self, "_start"):
            self.close()


class Engine:
    """Compute threads of one model, with their buffers. One thread at a time may call methods. Call `close` once.

    Args:
        library: the native library.
        thread_count: number of compute threads.

    Raises:
        NoNativeKernels: the threads cannot be started.
    """

    def __init__(self, library: Library, thread_count: int) -> None:
        self.library = library
        self.thread_count = thread_count
        self._handle: int | None = library.make_engine(thread_count)
        if self._handle is None:
            raise NoNativeKernels(f"{thread_count} compute threads cannot be started")

    def step(self, model: ModelStruct, step: StepStruct) -> bool:
        """Compute a step.

        Args:
            model: weights and dimensions.
            step: inputs and outputs of the step.

        Returns:
            False if the step was abandoned.

        Raises:
            MemoryError: there is not enough memory for intermediate results.
        """
        status = self.library.step(self._handle, ctypes.addressof(model), ctypes.addressof(step))
        _check(status)
        return bool(status == FINISHED)

    def logprobs(
        self, model: ModelStruct, hidden: Float32Array, targets: npt.NDArray[np.int32], top_count: int
    ) -> tuple[Float32Array, npt.NDArray[np.int32]] | None:
        """Compute log-probabilities of given tokens and of the most probable tokens.

        Args:
            model: weights and dimensions.
            hidden: float32 [n, hidden_size], as a step returns it.
            targets: int32 [n], one token for each row.
            top_count: number of most probable tokens, at most vocab_size.

        Returns:
            Two arrays. [n, 1 + top_count] has the log-probabilities of the target, then of the most probable tokens,
            most probable first. [n, top_count] has the ids of the most probable tokens. None if a row has NaN or
            infinity.
        """
        logprobs = np.empty((len(targets), 1 + top_count), dtype=np.float32)
        ids = np.empty((len(targets), top_count), dtype=np.int32)
        status = self.library.logprobs(
            self._handle,
            ctypes.addressof(model),
            address(hidden),
            len(targets),
            address(targets),
            top_count,
            address(logprobs),
            address(ids),
        )
        _check(status)
        return (logprobs, ids) if status == FINISHED else None

    def sample(self, step: StepStruct, logits: npt.NDArray[np.float32]) -> None:
        """Run only the sampling of a step.

        Args:
            step: description whose sampling fields must be set. The method writes its output fields.
            logits: float32 [sampled_count, vocab_size].
        """
        self.library.sampling(self._handle, ctypes.addressof(step), logits.shape[1], address(logits))

    def product(self, x: Array, weight: MatrixStruct, outputs: int, *, batch_invariant: bool = False) -> Float32Array:
        """Compute one matrix product.

        Args:
            x: [m, k], float32 or bfloat16.
            weight: packed [outputs, k].
            outputs: output channels.
            batch_invariant: True to sum in an order that does not depend on m.

        Returns:
            float32 [m, outputs].
        """
        rows, columns = x.shape
        padded = np.zeros((rows + 32, -(-columns // 32) * 32), dtype=x.dtype)
        padded[:rows, :columns] = x
        result = np.empty((rows, outputs), dtype=np.float32)
        self.library.product(
            self._handle,
            _dtype_number(x),
            batch_invariant,
            address(padded),
            rows,
            ctypes.addressof(weight),
            outputs,
            address(result),
        )
        return result

    def attention(self, model: ModelStruct, step: StepStruct, queries: Array) -> Array:
        """Compute only the attention of a model's first layer, over keys and values in the step's pages.

        Args:
            model: description whose attention fields must be set.
            step: description whose attention fields must be set.
            queries: [rows, heads * head_dim] in the model's dtype.

        Returns:
            [rows, heads * head_dim], or [rows, heads * latent_dim] with latent attention.
        """
        layer = LayerStruct.from_address(model.layers)
        columns = layer.head_count * (model.latent_dim or layer.head_dim)
        attended = np.empty((len(queries), columns), dtype=queries.dtype)
        self.library.attention(
            self._handle, ctypes.addressof(model), ctypes.addressof(step), address(queries), address(attended)
        )
        return attended

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.library.close_engine(handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()


def empty_array(shape: tuple[int, ...], dtype: str) -> Array:
    """Allocate an uninitialized array aligned to a cache line, so that no vector load crosses two lines.

    Args:
        shape: dimensions, as in numpy.empty.
        dtype: "float32", "bfloat16" or "uint8".
    """
    kind = _ARRAY_TYPES[dtype]
    byte_count = math.prod(shape) * kind.itemsize
    memory = np.empty(byte_count + CACHE_LINE_BYTES, dtype=np.uint8)
    first = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[first : first + byte_count].view(kind).reshape(shape)


def address(array: Array) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def int32_array(values: Iterable[int]) -> array[int]:
    """Create an array for the few numbers of one call. Getting its address is 20 times faster than with numpy.

    Args:
        values: the numbers.
    """
    return array("i", values)


def start_of(numbers: array[Any]) -> int:
    start, _ = numbers.buffer_info()
    return start


def _dtype_number(array: Array) -> int:
    return next(DTYPES[name] for name, kind in _ARRAY_TYPES.items() if array.dtype == kind)


def load_library(*, on_compile: Callable[[str, float], None] = lambda sentence, seconds: None) -> Library:
    """Load the best library for this machine, and compile it if necessary.

    TRIOSERVE_NATIVE=0 in the environment disables it.

    Args:
        on_compile: see `build_library`.

    Raises:
        NoNativeKernels: the library is not available. The message contains the reason.
    """
    if os.environ.get("TRIOSERVE_NATIVE") == "0":
        raise NoNativeKernels("TRIOSERVE_NATIVE is 0")
    reason = "this is not a Linux machine on x86-64 with AVX2"
    for level in supported_levels():
        try:
            return Library(build_library(level, on_compile=on_compile), level)
        except CannotBuild as error:
            raise NoNativeKernels(str(error)) from None
        except NoNativeKernels as error:
            reason = str(error)  # The system rejects this level, so the next level with fewer instructions is tried.
    raise NoNativeKernels(reason)


def _declared(function: Callable[..., int], returned: object, *arguments: object) -> Callable[..., int]:
    function.restype = returned  # type: ignore[attr-defined]  # ctypes functions take it
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


def _check(status: int) -> None:
    if status not in (FINISHED, ABANDONED):
        raise MemoryError("no memory for a step's intermediate results")
