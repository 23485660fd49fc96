"""Makes the order in which Trio runs its tasks a function of a seed: the same seed, the same order, in every process.

Trio chooses by chance which of the tasks that can run goes first, so that nobody relies on an order. It has a switch
for tests that makes the choice depend on its source of chance alone, under private names. They are looked up here and
nowhere else, and their absence is an error: a simulation that cannot be repeated must not look as if it could.
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
    """Random numbers from a seed for the thread that makes it, and from another source for all other threads.

    Trio has one source for all threads. A Trio loop in another thread would take numbers out of the seed's sequence.

    Args:
        others: source of the other threads.
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
    """Make `trio.run` schedule by a seed in this thread, while entered.

    Args:
        seed: of the random numbers by which tasks are ordered.

    Raises:
        StartupError: this version of Trio cannot do it.
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
