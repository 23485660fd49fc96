"""How what is counted is divided among ranks, and which rows or columns of a tensor one of them has."""

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
"""The first, and how many."""
Runs: TypeAlias = tuple[Run, ...]

UNITS = (256, 32, 16)
"""What the middles of MLPs are divided in: the blocks of ggml's K quants, those of its other formats, and what the
native kernels ask for. A cut within a block costs the block."""
UNEVENNESS_MAX = 1 / 8  # by which the widest part may be wider than the average, for the sake of larger units


class Cut(NamedTuple):
    """What a rank has of a module's tensors. rows: these rows of its weight and of its bias; columns: these columns of
    its weight, whose products are parts of a sum, so that its bias is there once; None: all of them. has_bias: False:
    another rank has it, and zeros are here."""

    rows: Runs | None = None
    columns: Runs | None = None
    has_bias: bool = True


WHOLE = Cut()


def rows(*runs: Run) -> Cut:
    return Cut(rows=runs)


def columns(rank: int, *runs: Run) -> Cut:
    return Cut(columns=runs, has_bias=rank == 0)


def times(run: Run, size: int, start: int = 0) -> Run:
    """A run of things as one of their numbers, of which each has `size`; the first of all is `start`."""
    return start + run[0] * size, run[1] * size


def runs_of(indices: Iterable[int]) -> Runs:
    """Neighbours become one run."""
    found: list[Run] = []
    for index in indices:
        if found and index == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return tuple(found)


def even_runs(count: int, size: int, unit: int = 1) -> Runs:
    """One for each rank, in multiples of unit but for the end of the last. None has more than the first. Where there
    are fewer units than ranks, some are empty."""
    units = -(-count // unit)
    ends = [min(count, (units * rank + size - 1) // size * unit) for rank in range(size + 1)]
    return tuple((first, end - first) for first, end in itertools.pairwise(ends))


def wide_runs(count: int, size: int) -> Runs | None:
    """The same in the largest unit of UNITS that divides it without making one rank's part much wider; where 16 does
    not divide it, in any number. None: there are fewer units than ranks."""
    units = [unit for unit in UNITS if count % unit == 0] or [1]
    for unit in units:
        widest = -(-count // unit // size) * unit
        if count // unit >= size and widest * size <= count * (1 + UNEVENNESS_MAX):
            return even_runs(count, size, unit)
    return even_runs(count, size, units[-1]) if count // units[-1] >= size else None


class HeadRuns(NamedTuple):
    heads: Run
    groups: Run


def head_runs(head_count: int, group_count: int, rank: int, size: int) -> HeadRuns | None:
    """A rank's heads and the groups that they belong to, such as the heads of keys and values: whole groups, uneven
    where they do not divide; with more ranks than groups one group, which several ranks have, and some of its heads.
    None: there are more ranks than heads."""
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
