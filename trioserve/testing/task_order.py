"""Makes the order in which Trio runs its tasks a function of a seed: the same seed, the same order, in every process.

Trio chooses by chance which of the tasks that can run goes first, so that nobody relies on an order. It has a switch
for tests that makes the choice depend on its source of chance alone, under private names. They are looked up here and
nowhere else, and their absence is an error: a simulation that cannot be repeated must not look as if it could.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import trio

from trioserve.contracts.errors import StartupError

__all__ = ["seeded_schedule"]

SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
SOURCE = "_r"


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """While entered, trio.run schedules by `seed`. Raises StartupError when this version of Trio cannot."""
    module = trio._core._run
    source = getattr(module, SOURCE, None)
    if not hasattr(module, SWITCH) or not isinstance(source, Random):
        raise StartupError(
            f"Trio {trio.__version__} has no {SWITCH} or no {SOURCE}, so its scheduling cannot be repeated: use a "
            "version that has them (0.31 to 0.35 do), or simulate without --stack"
        )
    was_on, state = getattr(module, SWITCH), source.getstate()
    setattr(module, SWITCH, True)
    source.seed(seed)
    try:
        yield
    finally:
        setattr(module, SWITCH, was_on)
        source.setstate(state)
