"""Whether anybody watches something, so that what watchers alone need is kept only for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchers"]


class Watchers:
    """True while there are any. forget: called when the last one has gone."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Somebody looks now and then."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._forget()
