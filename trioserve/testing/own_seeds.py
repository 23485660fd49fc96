"""From which seed an engine of a test draws those of requests that name none: the same in every run of the test."""

from __future__ import annotations

from itertools import count

import trio

__all__ = ["next_own_seed"]

_COUNTS: trio.lowlevel.RunVar[count[int]] = trio.lowlevel.RunVar("trioserve.testing.own_seeds")


def next_own_seed() -> int:
    """Another one for each engine of a Trio run, so that no two that are open together draw alike."""
    try:
        counted = _COUNTS.get()
    except LookupError:
        _COUNTS.set(counted := count())
    return next(counted)
