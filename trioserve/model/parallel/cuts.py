"""Division of counts among ranks, and the rows or columns of a tensor that a rank has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

__all__ = [
    "WHOLE",
    "Cut",
    "HeadRuns",
    "Run",
    "Runs",
    "columns",
    "even_runs",
    "head_runs",
    "rows",
    "runs_of",
    "times",
    "wide_runs",
]

Run: TypeAlias = tuple[int, int]
"""Index of the first item, and number of items."""
Runs: TypeAlias = tuple[Run, ...]

UNITS = (256, 32, 16)
"""Units in which MLPs are divided: the blocks of ggml's K quants, the blocks of its other formats, and the unit of the
native kernels. A tensor that is cut within a block is stored without blocks."""
UNEVENNESS_MAX = 1 / 8  # the widest part may exceed the average by this ratio, to use a larger unit


class Cut(NamedTuple):
    """The part of a module's tensors that a rank has.

    Attributes:
        rows: rows of the weight and of the bias. None: all.
        columns: columns of the weight. The ranks' products are summed, so only one rank may add the bias. None: all.
        has_bias: False: another rank adds the bias, and this rank has zeros.
    """

    rows: Runs | None = None
    columns: Runs | None = None
    has_bias: bool = True


WHOLE = Cut()


def rows(*runs: Run) -> Cut:
    return Cut(rows=runs)


def columns(rank: int, *runs: Run) -> Cut:
    return Cut(columns=runs, has_bias=rank == 0)


def times(run: Run, size: int, start: int = 0) -> Run:
    """Convert a run of items, such as heads, to a run of rows.

    Args:
        run: the items.
        size: rows of each item.
        start: row of the first item.
    """
    return start + run[0] * size, run[1] * size


def runs_of(indices: Iterable[int]) -> Runs:
    """Combine indices into runs. Consecutive indices become one run.

    Args:
        indices: items, in order.
    """
    found: list[Run] = []
    for index in indices:
        if found and index == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return tuple(found)


def even_runs(count: int, size: int, unit: int = 1) -> Runs:
    """Divide a count evenly among ranks. No rank has more than the first one.

    Args:
        count: items to divide.
        size: number of ranks.
        unit: runs have multiples of this, except for the last one.

    Returns:
        One run for each rank. Some are empty if there are fewer units than ranks.
    """
    units = -(-count // unit)
    ends = [min(count, (units * rank + size - 1) // size * unit) for rank in range(size + 1)]
    return tuple((first, end - first) for first, end in itertools.pairwise(ends))


def wide_runs(count: int, size: int) -> Runs | None:
    """Divide the width of an MLP among ranks, in a unit that suits blocks and kernels.

    Uses the largest of UNITS that divides the width, unless the widest part would exceed the average by more than
    UNEVENNESS_MAX. A width that 16 does not divide is divided without a unit.

    Args:
        count: the width.
        size: number of ranks.

    Returns:
        One run for each rank. None: there are fewer units than ranks.
    """
    units = [unit for unit in UNITS if count % unit == 0] or [1]
    for unit in units:
        widest = -(-count // unit // size) * unit
        if count // unit >= size and widest * size <= count * (1 + UNEVENNESS_MAX):
            return even_runs(count, size, unit)
    return even_runs(count, size, units[-1]) if count // units[-1] >= size else None


class HeadRuns(NamedTuple):
    """The heads of a rank, and the groups of these heads."""

    heads: Run
    groups: Run


def head_runs(head_count: int, group_count: int, rank: int, size: int) -> HeadRuns | None:
    """Select the heads of a rank and their groups. For attention, a group is a KV head and the query heads that use it.

    A rank gets whole groups, as evenly as possible. If there are more ranks than groups, a rank gets one group and some
    of its heads, and other ranks have copies of that group.

    Args:
        head_count: heads of the whole model.
        group_count: groups of the whole model.
        rank: number of the rank.
        size: number of ranks.

    Returns:
        The rank's heads and groups. None: there are more ranks than heads.
    """
    each = head_count // group_count
    if size > head_count:
        return None
    if size <= group_count:
        groups = even_runs(group_count, size)[rank]
        return HeadRuns(times(groups, each), groups)
    first, ranks = next(run for run in even_runs(size, group_count) if run[0] <= rank < sum(run))
    group = even_runs(size, group_count).index((first, ranks))
    begin, count = even_runs(each, ranks)[rank - first]
    return HeadRuns((group * each + begin, count), (group, 1))
