"""How alike vectors are."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import trio

from trioserve.contracts.pooling import Pooled

__all__ = ["cosines"]

PIECE_NUMBERS_MAX = 50_000  # multiplied in a few milliseconds; after as many, others get their turn


async def cosines(left: Sequence[Pooled], right: Sequence[Pooled]) -> list[float]:
    """Of vectors of length 1: of each on the right with its own on the left, or with the only one there."""
    found: list[float] = []
    number_count = 0
    first = left[0].values()
    for index, one in enumerate(right):
        other = first if len(left) == 1 else left[index].values()
        product = sum(map(operator.mul, other, one.values()))
        found.append(max(-1.0, min(1.0, product)))
        number_count += len(one)
        if number_count >= PIECE_NUMBERS_MAX:
            number_count = 0
            await trio.lowlevel.checkpoint()
    return found
