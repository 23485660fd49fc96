"""Counts the watchers of something, so that data only for watchers is kept only while there are any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchers"]


class Watchers:
    """True while there are watchers.

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
        """Count as a watcher for the time of the scope."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._forget()
