"""What the ranks of a group do together in a step: sum, and gather. Each of them calls the same in the same order."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Collectives", "Lonely"]


class Collectives(Protocol):
    """One rank's door to the others. Used by the thread that computes, alone. Where another rank is gone, a call may
    wait for ever, or raise: whoever started the ranks ends all of them then."""

    rank: int
    size: int
    native: int | None
    """The address of a CollectivesStruct, through which the native kernels do the same without Python, valid as long
    as this object."""

    @property
    def seconds(self) -> float:
        """That sums and gatherings took so far, waiting for others included."""
        ...

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        """values: a contiguous array of numpy's or tensor of torch's, of the same shape and dtype in every rank. It
        becomes the sum of all of them, added up in the order of the ranks, so that it has the same bits in each.
        Returns whether any rank said is_abandoned: the same everywhere."""
        ...

    def gather(self, own: Any) -> Any:
        """own: as above. Returns [size, *own.shape], what each rank gave, in the order of the ranks."""
        ...

    def close(self) -> None: ...


class Lonely:
    """A group of one."""

    rank: int = 0
    size: int = 1
    native: int | None = None
    seconds: float = 0.0

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        return is_abandoned

    def gather(self, own: Any) -> Any:
        return own[None]

    def close(self) -> None:
        pass
