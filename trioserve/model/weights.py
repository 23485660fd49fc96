"""Which tensors a model waits for and where each goes. Every one must come exactly once, in the right shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.stored_tensor import Bytes, StoredTensor
from trioserve.model.number_formats import Dtype, Values

__all__ = ["Progress", "Slot", "fill_slots"]

Progress = Callable[[int, int], None]
"""progress(bytes_done, bytes_total), after each tensor. What it raises ends the loading."""


class Slot(NamedTuple):
    """A place for one tensor. fill copies it there; it is given the values in `dtype`, which are not kept.

    block_type: if the tensor is stored in blocks of this type, fill_blocks is given these instead.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    fill: Callable[[Values], object]
    block_type: str | None = None
    fill_blocks: Callable[[Bytes], object] | None = None


def fill_slots(
    slots: Iterable[Slot],
    tensors: Iterable[StoredTensor],
    *,
    bytes_total: int,
    progress: Progress | None,
    thread_count: int = 1,
) -> None:
    """Read every tensor and put it into its slot, so that one tensor a thread is held besides the weights.

    thread_count: how many tensors are read and filled in at the same time, in threads of this call; 1 does all in the
    calling thread. Raises ModelLoadError, before anything is read, for a tensor that no slot waits for, that comes
    twice, has another shape, or never comes; and if one cannot be read.
    """
    bytes_done = 0
    with contextlib.closing(_filled(_pairs(slots, tensors), thread_count)) as filled:
        for byte_count in filled:
            bytes_done += byte_count
            if progress is not None:
                progress(min(bytes_done, bytes_total), bytes_total)


def _pairs(slots: Iterable[Slot], tensors: Iterable[StoredTensor]) -> list[tuple[Slot, StoredTensor]]:
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


def _filled(pairs: list[tuple[Slot, StoredTensor]], thread_count: int) -> Generator[int, None, None]:
    """The bytes of each tensor when it is in its place."""
    if thread_count == 1:
        yield from map(_fill, pairs)
        return
    with ThreadPoolExecutor(thread_count, "trioserve-load") as pool:
        yield from pool.map(_fill, pairs)  # closed early, it drops what has not begun


def _fill(pair: tuple[Slot, StoredTensor]) -> int:
    slot, tensor = pair
    if tensor.read_blocks is not None and slot.fill_blocks is not None and tensor.block_type == slot.block_type:
        slot.fill_blocks(tensor.read_blocks())
    else:
        slot.fill(tensor.read(slot.dtype))
    return tensor.byte_count
