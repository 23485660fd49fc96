"""Seeds for the engines of a test. They are the same in every run of the test."""

from __future__ import annotations

from itertools import count

import trio

__all__ = ["next_own_seed"]

_COUNTS: trio.lowlevel.RunVar[count[int]] = trio.lowlevel.RunVar("trioserve.testing.own_seeds")


def next_own_seed() -> int:
    """Return a number that no other engine of this Trio run has, so that two open engines draw different seeds."""
    try:
        counter = _COUNTS.get()
    except LookupError:
        _COUNTS.set(counter := count())
    return next(counter)
