"""What ranks add up in one step, and whether they go on with it: they agree on that in the sums themselves, since a
rank that stopped alone would leave the others waiting."""

from __future__ import annotations

from typing import Any

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.parallel.collectives import Collectives

__all__ = ["RankSums"]


class RankSums:
    """Of one step in one rank."""

    def __init__(self, collectives: Collectives, is_abandoned: IsAbandoned) -> None:
        """is_abandoned: this rank's own view. never_abandoned asks nobody, in all ranks or in none."""
        self._collectives = collectives
        self._is_abandoned = is_abandoned
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the step is abandoned, the same in every rank between two sums."""
        return self._is_over or (self._collectives.size == 1 and self._is_abandoned())

    def add_(self, part: Any) -> None:
        """part: see Collectives. It becomes the sum."""
        if self._is_abandoned is never_abandoned:
            self._collectives.sum_(part)
        else:
            self._is_over |= self._collectives.sum_(part, self._is_abandoned())
