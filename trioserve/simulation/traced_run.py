"""Trace, counts and digest of simulations in virtual time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

import trio

__all__ = ["TracedRun", "without_log_lines"]


class TracedRun:
    """A run with a trace.

    Args:
        trace: receives each line of the trace. None: the lines only go into the digest.

    Attributes:
        counts: number of occurrences by name.
        digest: digest of the trace so far.
    """

    def __init__(self, trace: Callable[[str], None] | None) -> None:
        self.counts: Counter[str] = Counter()
        self._trace = trace
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def tell(self, line: str) -> None:
        line = f"{trio.current_time():.3f} {line}"
        self._digest.update(line.encode() + b"\n")
        if self._trace is not None:
            self._trace(line)

    def count(self, what: str) -> None:
        self.counts[what] += 1


@contextmanager
def without_log_lines(name: str) -> Iterator[None]:
    """Silence a logger and its children. Its errors are part of the plan.

    Args:
        name: name of the logger.
    """
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
