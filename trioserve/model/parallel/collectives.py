"""Collective operations of ranks within a step: sum and gather. All ranks make the same calls in the same order."""

from __future__ import annotations

from typing import Any, Protocol

from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["Collectives", "Lonely", "RankSums"]


class Collectives(Protocol):
    """Connection of one rank to the other ranks. Only the thread that computes uses it.

    If another rank is lost, a call may block for ever or raise. The process that started the ranks ends all of them in
    that case.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        native: address of a CollectivesStruct, through which native kernels make the same calls without Python. It is
            valid as long as this object. None: kernels need NativeCallbacks.
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
            values: contiguous numpy array or torch tensor, with the same shape and dtype in every rank. It is summed in
                the order of the ranks.
            is_abandoned: this rank wants to abandon the step.

        Returns:
            True if any rank passed is_abandoned. Every rank gets the same answer.
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
    """Sums over all ranks during one step of one rank, and their agreement on abandoning the step.

    Args:
        collectives: connection to the other ranks.
        is_abandoned: this rank's own view. Either all ranks pass `never_abandoned`, which exchanges no votes, or none.
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
