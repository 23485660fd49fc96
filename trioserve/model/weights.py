"""Which tensors a model waits for and where each goes. Every one must come exactly once, in the right shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.stored_tensor import Bytes, StoredTensor
from trioserve.model.number_formats import Dtype, Values
from trioserve_kernels.native import FileRowsStruct, Library, Loading, RowsKind

__all__ = ["Progress", "RowsTarget", "Slot", "fill_slot", "fill_slots", "paired"]

Progress = Callable[[int, int], None]
"""progress(bytes_done, bytes_total), first when reading has begun, and then again and again. What it raises ends the
loading."""

PART_VALUES = 2**20
"""Of a large matrix, read and filled in at once: so little is held besides the weights, and what is read is in the
CPU's caches still when it is packed."""

PROGRESS_SECONDS = 0.1  # between two looks at how far the library is


class RowsTarget(NamedTuple):
    """Where the kernels' library puts rows of a file by itself, which lie there in the slot's dtype, or in blocks of
    its block_type. to: an address; what the others are, cpu/loading.h says."""

    library: Library
    kind: RowsKind
    type: int
    to: int
    first_block: int = 0
    block_step: int = 1
    pairs_of: int = 0


class Slot(NamedTuple):
    """A place for one tensor. fill copies it there; it is given the values in `dtype`, which are not kept.

    block_type: if the tensor is stored in blocks of this type, fill_blocks is given these instead. part(first_row,
    row_count) is the place of some of its rows; both are multiples of part_rows, but for the count of the last ones.
    None: all come at once. target: where what fill or fill_blocks do can be left to the kernels' library.
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


def fill_slots(
    slots: Iterable[Slot],
    tensors: Iterable[StoredTensor],
    *,
    bytes_total: int,
    progress: Progress | None,
    thread_count: int = 1,
) -> None:
    """Read every tensor and put it into its slot, large ones in parts where both can be had so. One of these, or one
    whole tensor, is held for each thread besides the weights.

    thread_count: how many are read and filled in at the same time, in threads of this call; 1 does all in the calling
    thread. Raises ModelLoadError, before anything is read, for a tensor that no slot waits for, that comes
    twice, has another shape, or never comes; and if one cannot be read.
    """
    bytes_done = 0
    parts = [part for slot, tensor in paired(slots, tensors) for part in _parts(slot, tensor)]
    by_library = [part for part in parts if _is_for_library(*part)]
    others = [part for part in parts if not _is_for_library(*part)]
    with contextlib.closing(_filled(by_library, others, thread_count)) as filled:
        for byte_count in filled:
            bytes_done += byte_count
            if progress is not None:
                progress(min(bytes_done, bytes_total), bytes_total)


def paired(slots: Iterable[Slot], tensors: Iterable[StoredTensor]) -> list[tuple[Slot, StoredTensor]]:
    """Each slot and its tensor, of which none is read. Raises ModelLoadError as fill_slots does."""
    waiting = {slot.name: slot for slot in slots}
    pairs: dict[str, tuple[Slot, StoredTensor]] = {}
    for tensor in tensors:
        name = tensor.name
        if name in pairs:
            raise ModelLoadError(f"the checkpoint gives {name} twice: it is damaged, fetch it again")
        slot = waiting.pop(name, None)
        if slot is None:
            raise ModelLoadError(
                f"the checkpoint gives {name}, which the model has no place for: weights and config are not of the "
                "same model"
            )
        if tensor.shape != slot.shape:
            raise ModelLoadError(
                f"{name} has shape {list(tensor.shape)}, but the config asks for {list(slot.shape)}: weights and "
                "config are not of the same model"
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
    """The bytes of what is in its place, again and again; 0 first, when reading has begun or is about to."""
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
        yield from pool.map(fill_slot, others)  # closed early, it drops what has not begun


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
            f"cannot load {error}: it has become shorter since it was opened, fetch it again"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot load {error.filename}: {error.strerror}") from error


def _loading(parts: list[tuple[Slot, StoredTensor]]) -> Loading:
    files: dict[Path, int] = {}
    structs = []
    library = None
    for slot, tensor in parts:
        target, rows = slot.target, tensor.rows
        assert target is not None, "chosen for having one"
        assert rows is not None, "chosen for having them"
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
    assert library is not None, "there are parts"
    return Loading(library, list(files), structs)


def fill_slot(pair: tuple[Slot, StoredTensor]) -> int:
    """Read one, and put it into its place. Returns how many bytes that were."""
    slot, tensor = pair
    if tensor.read_blocks is not None and slot.fill_blocks is not None and tensor.block_type == slot.block_type:
        slot.fill_blocks(tensor.read_blocks())
    else:
        slot.fill(tensor.read(slot.dtype))
    return tensor.byte_count
