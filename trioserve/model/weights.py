"""Defines the loading slots of a model's weights, and fills them from a checkpoint.

Weights go to a device through a few host buffers. Reading, conversion and copying overlap. Threads read pieces of
weights, convert them, and put them into free buffers. The calling thread starts the copy of each full buffer, and is
the only thread that uses the device. A buffer is free again when its copy has ended. So the host memory is bounded by
the buffers and by what the threads read at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.stored_tensor import Bytes, StoredTensor
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, bytes_of
from trioserve_kernels.native import Library, Loading
from trioserve_kernels.structs import FileRowsStruct, RowsKind

__all__ = [
    "BUFFER_BYTES",
    "BUFFER_COUNT",
    "READ_BYTES_MAX",
    "Piece",
    "Progress",
    "RowsTarget",
    "Slot",
    "StagedSlot",
    "StagedWeight",
    "Staging",
    "copied",
    "fill_slot",
    "fill_slots",
    "paired",
]


# A copy of 16 MiB takes 0.3 to 1.3 ms by PCIe, so its start costs little. With 8 buffers, threads fill some of them
# while the device reads others.
BUFFER_BYTES, BUFFER_COUNT = 2**24, 8
READ_BYTES_MAX = 2**29  # Bytes that threads read at the same time. A larger piece is read alone.


class Staging(Protocol):
    """Host buffers, and their copies to a device."""

    @property
    def buffers(self) -> Sequence[Bytes]:
        """Buffers of equal size. The first access allocates them."""
        ...

    def reserve(self, byte_count: int) -> Any:
        """Return memory of the device.

        Args:
            byte_count: size of the memory.
        """
        ...

    def send(self, buffer: int, byte_count: int, to: Any, offset: int) -> Callable[[], object]:
        """Start a copy to the device, and do not wait for its end.

        Args:
            buffer: index of the buffer.
            byte_count: number of bytes to copy from the start of the buffer.
            to: result of reserve.
            offset: position of the first byte in `to`.

        Returns:
            Function that waits for the end of the copy.
        """
        ...


class Piece(NamedTuple):
    """Part of a weight that one thread reads.

    Attributes:
        offset: position of the first byte in the weight on the device.
        bytes_max: upper limit of the bytes that `read` returns.
        read: function that reads and converts the bytes, a one-dimensional array.
        counts_as: bytes that are reported as done after the piece.
    """

    offset: int
    bytes_max: int
    read: Callable[[], Bytes]
    counts_as: int


class StagedWeight(NamedTuple):
    """A weight to copy.

    Attributes:
        pieces: pieces that make up the weight.
        byte_count: bytes of all pieces. None: there is one piece, and its size is known after reading.
        fill: function that copies the weight to its destination. The argument is memory of the device with all bytes.
            The function may return before the device has executed the copies.
    """

    pieces: Sequence[Piece]
    byte_count: int | None
    fill: Callable[[Any], object]


class _Open:
    """A weight of which some bytes were not sent yet."""

    def __init__(self, weight: StagedWeight) -> None:
        self.fill = weight.fill
        self.byte_count = weight.byte_count
        self.sent_bytes = 0
        self.memory: Any = None


class _Full(NamedTuple):
    """A buffer that a thread has filled.

    Attributes:
        offset: position of the first byte in the weight.
        weight_bytes: size of the weight.
        ended: the piece, if it ends with this buffer.
    """

    weight: _Open
    buffer: int
    byte_count: int
    offset: int
    weight_bytes: int
    ended: Piece | None


def copied(weights: Iterable[StagedWeight], staging: Staging, thread_count: int) -> Generator[int, None, None]:
    """Copy weights, and yield the bytes to report after each piece.

    Closing the generator, or an error, ends the copying: no further piece is read, and the threads end after the pieces
    that they are reading.

    Args:
        weights: weights to copy. The first pieces are read first, and each weight is filled when it is complete.
        staging: buffers and device.
        thread_count: number of threads that read.

    Raises:
        ModelLoadError: a piece cannot be read.
    """
    waiting = deque((piece, opened) for weight in weights for opened in [_Open(weight)] for piece in weight.pieces)
    free: SimpleQueue[int | None] = SimpleQueue()
    full: SimpleQueue[_Full | BaseException] = SimpleQueue()
    buffers = staging.buffers
    for index in range(len(buffers)):
        free.put(index)
    sent: deque[tuple[int, Callable[[], object]]] = deque()
    reading_bytes = 0
    with ThreadPoolExecutor(thread_count, "trioserve-load") as pool:
        try:
            while waiting or reading_bytes:
                while waiting and (not reading_bytes or reading_bytes + waiting[0][0].bytes_max <= READ_BYTES_MAX):
                    reading_bytes += waiting[0][0].bytes_max
                    pool.submit(_read, *waiting.popleft(), buffers, free, full)
                # If no buffer is full, all threads may be waiting for one of those that the device reads.
                while sent and (full.empty() or len(sent) == len(buffers)):
                    _recycle(sent, free)
                found = full.get()
                if isinstance(found, BaseException):
                    raise found
                weight = found.weight
                if weight.memory is None:
                    weight.memory = staging.reserve(found.weight_bytes)
                sent.append((found.buffer, staging.send(found.buffer, found.byte_count, weight.memory, found.offset)))
                weight.sent_bytes += found.byte_count
                if weight.sent_bytes == found.weight_bytes:
                    weight.fill(weight.memory)
                    weight.memory = None
                if found.ended is not None:
                    reading_bytes -= found.ended.bytes_max
                    yield found.ended.counts_as
            while sent:
                _recycle(sent, free)
        finally:
            # From here on, no thread begins another piece. So each thread takes at most one None.
            pool.shutdown(wait=False, cancel_futures=True)
            for _ in range(thread_count):
                free.put(None)


def _recycle(sent: deque[tuple[int, Callable[[], object]]], free: SimpleQueue[int | None]) -> None:
    buffer, wait = sent.popleft()
    wait()
    free.put(buffer)


def _read(
    piece: Piece,
    weight: _Open,
    buffers: Sequence[Bytes],
    free: SimpleQueue[int | None],
    full: SimpleQueue[_Full | BaseException],
) -> None:
    """Read a piece, and put it into buffers. Called in a thread."""
    try:
        content = piece.read()
        weight_bytes = len(content) if weight.byte_count is None else weight.byte_count
        for first in range(0, len(content), len(buffers[0])):
            part = content[first : first + len(buffers[0])]
            buffer = free.get()
            if buffer is None:
                return
            buffers[buffer][: len(part)] = part
            ended = piece if first + len(part) == len(content) else None
            full.put(_Full(weight, buffer, len(part), piece.offset + first, weight_bytes, ended))
    except BaseException as error:  # The calling thread raises it.
        full.put(error)


Progress = Callable[[int, int], None]
"""progress(bytes_done, bytes_total) is called when reading begins, and then repeatedly. An exception from it ends the
loading."""

PART_VALUES = 2**20
"""Numbers of a large matrix that are read and filled in at once. Small parts need little memory besides the weights,
and are still in the CPU's caches when they are packed."""

PROGRESS_SECONDS = 0.1  # time between two reads of the kernel library's progress


class RowsTarget(NamedTuple):
    """Destination into which the kernel library reads rows of a file, without Python code.

    The file must contain the rows in the slot's dtype, or in blocks of the slot's block_type. cpu/loading.h describes
    the fields.

    Attributes:
        to: address of the destination.
    """

    library: Library
    kind: RowsKind
    type: int
    to: int
    first_block: int = 0
    block_step: int = 1
    pairs_of: int = 0


class StagedSlot(NamedTuple):
    """Destination of one weight on another device.

    Attributes:
        staging: host buffers and device. All slots of a model share them.
        fill: as in Slot, but the argument is memory of the device that has the bytes of the values.
        fill_blocks: as in Slot, but the argument is memory of the device that has the bytes of the blocks.
    """

    staging: Staging
    fill: Callable[[Any], object]
    fill_blocks: Callable[[Any], object] | None


class Slot(NamedTuple):
    """Destination of one weight.

    Attributes:
        name: name of the weight.
        shape: shape of the values that fill expects.
        dtype: number format of the values that fill expects.
        fill: function that copies values to the destination. It must not reference the values after the call.
        block_type: type of quantized blocks that fill_blocks accepts.
        fill_blocks: function that copies blocks, if the checkpoint stores the weight in blocks of block_type.
        part: function of a first row and a row count. It returns a slot for these rows. None: only the whole weight can
            be copied.
        part_rows: number of which the arguments of `part` must be multiples. Only the last row count may be smaller.
        target: destination for the kernel library, if the library can replace fill or fill_blocks.
        staged: destination on another device, which is filled through host buffers. fill and fill_blocks work, too.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    fill: Callable[[Values], object]
    block_type: str | None = None
    fill_blocks: Callable[[Bytes], object] | None = None
    part: Callable[[int, int], Slot] | None = None
    part_rows: int = 1
    target: RowsTarget | None = None
    staged: StagedSlot | None = None


def fill_slots(
    slots: Iterable[Slot],
    tensors: Iterable[StoredTensor],
    *,
    bytes_total: int,
    progress: Progress | None,
    thread_count: int = 1,
) -> None:
    """Read every tensor and copy it to its slot.

    Large tensors are read in pieces, if the tensor and its slot support this. The additional memory of a thread is one
    piece, or one whole tensor. Slots of another device are filled through a few host buffers, see `copied`.

    Args:
        slots: slots of the model.
        tensors: tensors of the checkpoint.
        bytes_total: bytes of all tensors, for progress.
        progress: function that is called repeatedly, or None.
        thread_count: number of threads that read and copy at the same time. With 1, the calling thread does all work.

    Raises:
        ModelLoadError: a tensor is missing, has no slot, occurs twice or has a wrong shape. These errors are raised
            before the first tensor is read. The error is also raised if a tensor cannot be read.
    """
    bytes_done = 0
    parts = [part for slot, tensor in paired(slots, tensors) for part in _parts(slot, tensor)]
    by_library = [part for part in parts if _is_for_library(*part)]
    others = [part for part in parts if not _is_for_library(*part)]
    staging = next((slot.staged.staging for slot, _ in others if slot.staged is not None), None)
    filling = _filled(by_library, others, thread_count) if staging is None else _staged(others, staging, thread_count)
    with contextlib.closing(filling) as filled:
        for byte_count in filled:
            bytes_done += byte_count
            if progress is not None:
                progress(min(bytes_done, bytes_total), bytes_total)


def paired(slots: Iterable[Slot], tensors: Iterable[StoredTensor]) -> list[tuple[Slot, StoredTensor]]:
    """Match slots with tensors, without reading any tensor.

    Args:
        slots: slots of the model.
        tensors: tensors of the checkpoint.

    Raises:
        ModelLoadError: see fill_slots.
    """
    waiting = {slot.name: slot for slot in slots}
    pairs: dict[str, tuple[Slot, StoredTensor]] = {}
    for tensor in tensors:
        name = tensor.name
        if name in pairs:
            raise ModelLoadError(f"the checkpoint has {name} twice: it is damaged, fetch it again")
        slot = waiting.pop(name, None)
        if slot is None:
            raise ModelLoadError(
                f"the checkpoint has {name}, which the model does not use: weights and config do not belong to the "
                "same model"
            )
        if tensor.shape != slot.shape:
            raise ModelLoadError(
                f"{name} has shape {list(tensor.shape)}, but the config asks for {list(slot.shape)}: weights and "
                "config do not belong to the same model"
            )
        pairs[name] = slot, tensor
    if waiting:
        missing = ", ".join(list(waiting)[:3])
        raise ModelLoadError(f"the checkpoint lacks {len(waiting)} tensors, among them {missing}: fetch it again")
    return list(pairs.values())


def _parts(slot: Slot, tensor: StoredTensor) -> Iterator[tuple[Slot, StoredTensor]]:
    if slot.part is None or tensor.rows is None:
        yield slot, tensor
        return
    row_count, columns = slot.shape
    at_once = max(1, PART_VALUES // columns // slot.part_rows) * slot.part_rows
    if row_count <= at_once:
        yield slot, tensor
        return
    for first_row in range(0, row_count, at_once):
        some = first_row, min(at_once, row_count - first_row)
        yield slot.part(*some), tensor.rows.part(*some)


def _is_for_library(slot: Slot, tensor: StoredTensor) -> bool:
    if slot.target is None or tensor.rows is None or slot.block_type != tensor.block_type:
        return False
    return slot.block_type is not None or slot.dtype == tensor.dtype


def _filled(
    by_library: list[tuple[Slot, StoredTensor]], others: list[tuple[Slot, StoredTensor]], thread_count: int
) -> Generator[int, None, None]:
    """Fill all slots piece by piece, and yield the byte count of each piece. The first yielded number is 0, when
    reading begins.
    """
    if thread_count == 1 or not by_library:
        yield 0
    if thread_count == 1:
        for part in by_library:
            with _read_errors():
                _loading([part]).run()
            yield part[1].byte_count
        yield from map(fill_slot, others)
        return
    with ThreadPoolExecutor(thread_count, "trioserve-load") as pool:
        if by_library:
            yield from _filled_by_library(_loading(by_library), pool, thread_count)
        yield from pool.map(fill_slot, others)  # Closing the generator early cancels pieces that have not begun.


def _staged(pairs: list[tuple[Slot, StoredTensor]], staging: Staging, thread_count: int) -> Generator[int, None, None]:
    """Fill all slots through host buffers, see _filled."""
    yield 0
    yield from copied(itertools.starmap(_staged_weight, pairs), staging, thread_count)


def _staged_weight(slot: Slot, tensor: StoredTensor) -> StagedWeight:
    staged, read_blocks = slot.staged, tensor.read_blocks
    assert staged is not None, "a slot of another device beside slots of this one"
    byte_count = math.prod(slot.shape) * VALUE_BYTES[slot.dtype]
    if read_blocks is not None and staged.fill_blocks is not None and tensor.block_type == slot.block_type:
        blocks = Piece(0, byte_count, lambda: read_blocks().reshape(-1), tensor.byte_count)
        return StagedWeight([blocks], None, staged.fill_blocks)

    def piece(offset: int, part: StoredTensor) -> Piece:
        part_bytes = math.prod(part.shape) * VALUE_BYTES[slot.dtype]
        return Piece(offset, part_bytes, lambda: bytes_of(part.read(slot.dtype)), part.byte_count)

    if tensor.rows is None:
        return StagedWeight([piece(0, tensor)], byte_count, staged.fill)
    row_count, row_bytes = slot.shape[0], byte_count // slot.shape[0]
    at_once = max(1, BUFFER_BYTES // row_bytes)
    parts = tensor.rows.part
    pieces = [
        piece(first * row_bytes, parts(first, min(at_once, row_count - first)))
        for first in range(0, row_count, at_once)
    ]
    return StagedWeight(pieces, byte_count, staged.fill)


def _filled_by_library(loading: Loading, pool: ThreadPoolExecutor, thread_count: int) -> Generator[int, None, None]:
    runs = [pool.submit(loading.run) for _ in range(thread_count)]
    bytes_done = 0
    try:
        yield 0
        are_running = True
        while are_running:
            are_running = bool(wait(runs, PROGRESS_SECONDS, FIRST_EXCEPTION).not_done)
            bytes_before, bytes_done = bytes_done, loading.bytes_done
            if bytes_done > bytes_before:
                yield bytes_done - bytes_before
        with _read_errors():
            for run in runs:
                run.result()
    finally:
        loading.stop()


@contextlib.contextmanager
def _read_errors() -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise ModelLoadError(
            f"cannot load {error}: the file has become shorter since it was opened, fetch it again"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot load {error.filename}: {error.strerror}") from error


def _loading(parts: list[tuple[Slot, StoredTensor]]) -> Loading:
    files: dict[Path, int] = {}
    structs = []
    library = None
    for slot, tensor in parts:
        target, rows = slot.target, tensor.rows
        assert target is not None, "a part for the library without a target"
        assert rows is not None, "a part for the library without rows in a file"
        library = target.library
        structs.append(
            FileRowsStruct(
                offset=rows.offset,
                rows=slot.shape[0],
                columns=slot.shape[1],
                row_bytes=rows.row_bytes,
                to=target.to,
                first_block=target.first_block,
                block_step=target.block_step,
                counts_as=tensor.byte_count,
                file=files.setdefault(rows.path, len(files)),
                kind=target.kind,
                type=target.type,
                pairs_of=target.pairs_of,
            )
        )
    assert library is not None, "no parts for the library"
    return Loading(library, list(files), structs)


def fill_slot(pair: tuple[Slot, StoredTensor]) -> int:
    """Read one tensor and copy it to its slot.

    Args:
        pair: slot and tensor.

    Returns:
        Number of bytes that were read.
    """
    slot, tensor = pair
    if tensor.read_blocks is not None and slot.fill_blocks is not None and tensor.block_type == slot.block_type:
        slot.fill_blocks(tensor.read_blocks())
    else:
        slot.fill(tensor.read(slot.dtype))
    return tensor.byte_count
