"""Makes the order in which Trio runs tasks depend only on a seed, so that a simulation can be repeated in any process.

Trio runs tasks that are ready in a random order, so that no program relies on an order. For tests, private names of
Trio make the order depend only on Trio's random numbers. Only this module uses these private names. If they are
missing, the module raises an error, because the simulation could not be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import trio

from trioserve.contracts.errors import StartupError

__all__ = ["seeded_schedule"]

SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"
SOURCE = "_r"


class _ThreadRandom(Random):
    """Source of random numbers that uses a seed in its own thread, and another source in all other threads.

    Trio has one source of random numbers for all threads. Without this class, a Trio loop in another thread would take
    numbers from the seed's sequence.

    Args:
        others: source of random numbers for the other threads.
    """

    def __init__(self, others: Random) -> None:
        super().__init__()
        self._others = others
        self._thread_id = threading.get_ident()

    def random(self) -> float:
        return super().random() if threading.get_ident() == self._thread_id else self._others.random()

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k) if threading.get_ident() == self._thread_id else self._others.getrandbits(k)


@contextmanager
def seeded_schedule(seed: int) -> Iterator[None]:
    """Make the order of tasks in `trio.run` depend on a seed in this thread, inside of the context.

    Args:
        seed: seed of the random numbers that determine the order of tasks.

    Raises:
        StartupError: this version of Trio does not have the private names.
    """
    module = trio._core._run
    source = getattr(module, SOURCE, None)
    if not hasattr(module, SWITCH) or not isinstance(source, Random):
        raise StartupError(
            f"Trio {trio.__version__} has no {SWITCH} or no {SOURCE}, so its scheduling cannot be repeated: use a "
            "version that has them (0.31 to 0.35 do), or simulate without --stack"
        )
    was_on = getattr(module, SWITCH)
    seeded = _ThreadRandom(source)
    seeded.seed(seed)
    setattr(module, SWITCH, True)
    setattr(module, SOURCE, seeded)
    try:
        yield
    finally:
        setattr(module, SWITCH, was_on)
        setattr(module, SOURCE, source)
