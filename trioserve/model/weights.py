"""Which tensors a model waits for and where each goes. Every one must come exactly once, in the right shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from trioserve.contracts.errors import ModelLoadError

__all__ = ["Progress", "Slot", "fill_slots"]

Progress = Callable[[int, int], None]
"""progress(bytes_done, bytes_total), after each tensor. What it raises ends the loading."""


class Slot(NamedTuple):
    """A place for one tensor. fill copies it there, in the model's dtype; the tensor is not kept."""

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]


def fill_slots(
    slots: Iterable[Slot], tensors: Iterable[tuple[str, Tensor]], *, bytes_total: int, progress: Progress | None
) -> None:
    """Put every tensor into its slot as it comes, so that one tensor at a time is held besides the weights.

    Raises ModelLoadError for a tensor that no slot waits for, that comes twice, has another shape, or never comes.
    """
    waiting = {slot.name: slot for slot in slots}
    filled: set[str] = set()
    bytes_done = 0
    for name, tensor in tensors:
        if name in filled:
            raise ModelLoadError(f"the checkpoint gives {name} twice: it is damaged, fetch it again")
        slot = waiting.pop(name, None)
        if slot is None:
            raise ModelLoadError(
                f"the checkpoint gives {name}, which the model has no place for: weights and config are not of the "
                "same model"
            )
        if tuple(tensor.shape) != slot.shape:
            raise ModelLoadError(
                f"{name} has shape {list(tensor.shape)}, but the config asks for {list(slot.shape)}: weights and "
                "config are not of the same model"
            )
        slot.fill(tensor)
        filled.add(name)
        bytes_done += tensor.nbytes
        if progress is not None:
            progress(min(bytes_done, bytes_total), bytes_total)
    if waiting:
        missing = ", ".join(list(waiting)[:3])
        raise ModelLoadError(f"the checkpoint lacks {len(waiting)} tensors, among them {missing}: fetch it again")
