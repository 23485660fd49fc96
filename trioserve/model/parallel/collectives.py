"""What the ranks of a group do together in a step: sum, and gather. Each of them calls the same in the same order."""

from __future__ import annotations

from typing import Any, Protocol

from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["Collectives", "Lonely", "RankSums"]


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


class RankSums:
    """Sums over all ranks during one step of one rank, and their agreement on abandoning the step.

    Args:
        collectives: connection to the other ranks.
        is_abandoned: this rank's own view. Either all ranks pass `never_abandoned`, and then ask nobody, or none does.
    """

    def __init__(self, collectives: Collectives, is_abandoned: IsAbandoned) -> None:
        self._collectives = collectives
        self._is_abandoned = is_abandoned
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True once the step is abandoned. Between two sums every rank has the same answer."""
        return self._is_over or (self._collectives.size == 1 and self._is_abandoned())

    def add_(self, part: Any) -> None:
        """Replace a part by the sum of all ranks' parts.

        Args:
            part: as in `Collectives.sum_`.
        """
        if self._is_abandoned is never_abandoned:
            self._collectives.sum_(part)
        else:
            self._is_over |= self._collectives.sum_(part, self._is_abandoned())
