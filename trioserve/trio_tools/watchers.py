"""Counts watchers, so that data that only watchers need is kept only while there are watchers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchers"]


class Watchers:
    """A counter of watchers. It is true while there are watchers.

    Args:
        forget: Called when the last watcher has left.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the caller as a watcher while the scope is open."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._forget()
