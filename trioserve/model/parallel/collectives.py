"""Collective operations of ranks during a step: sum and gather. All ranks make the same calls in the same order."""

from __future__ import annotations

from typing import Any, Protocol

from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["Collectives", "Lonely", "RankSums"]


class Collectives(Protocol):
    """Connection of one rank to the other ranks. Only the thread that computes uses it.

    If another rank is lost, a call may block forever or raise an exception. The process that started the ranks then
    ends all of them.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        native: address of a CollectivesStruct, with which native kernels make the same calls without Python. The
            address is valid as long as this object exists. None: kernels need NativeCallbacks.
    """

    rank: int
    size: int
    native: int | None

    @property
    def seconds(self) -> float:
        """Seconds spent in sum_ and gather so far, including the wait for other ranks."""
        ...

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        """Replace values by the sum over all ranks, with the same bits in every rank.

        Args:
            values: contiguous numpy array or torch tensor, with the same shape and dtype in every rank. The values of
                the ranks are added in the order of the ranks.
            is_abandoned: True if this rank wants to abandon the step.

        Returns:
            True if at least one rank passed is_abandoned. Every rank gets the same result.
        """
        ...

    def gather(self, own: Any) -> Any:
        """Collect the values of all ranks.

        Args:
            own: contiguous numpy array or torch tensor, with the same shape and dtype in every rank.

        Returns:
            [size, *own.shape], in the order of the ranks.
        """
        ...

    def close(self) -> None: ...


class Lonely:
    """The Collectives of a single rank."""

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
    """Computes sums over all ranks during one step. With each sum, the ranks agree whether the step is abandoned.

    Args:
        collectives: connection to the other ranks.
        is_abandoned: returns True if this rank wants to abandon the step. If one rank passes `never_abandoned`, all
            ranks must pass it. The ranks then exchange no votes.
    """

    def __init__(self, collectives: Collectives, is_abandoned: IsAbandoned) -> None:
        self._collectives = collectives
        self._is_abandoned = is_abandoned
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True after the step was abandoned. Between two sums, the value is equal in all ranks."""
        return self._is_over or (self._collectives.size == 1 and self._is_abandoned())

    def add_(self, part: Any) -> None:
        """Replace a partial sum by the sum over all ranks.

        Args:
            part: this rank's partial sum, see `Collectives.sum_`.
        """
        if self._is_abandoned is never_abandoned:
            self._collectives.sum_(part)
        else:
            self._is_over |= self._collectives.sum_(part, self._is_abandoned())
