"""How many images that are to be changed may be held at a time. Each is kept, decoded, until its request is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioserve.contracts.errors import Overloaded

__all__ = ["EditPlaces"]

EDITS_MAX = 32  # with their masks, of the largest size, less than a gigabyte
RETRY_SECONDS = 5.0


class EditPlaces:
    def __init__(self, edits_max: int = EDITS_MAX) -> None:
        self.taken_count = 0
        self._edits_max = edits_max

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises Overloaded when all are taken."""
        if self.taken_count >= self._edits_max:
            raise Overloaded(
                f"{self._edits_max} images are being changed already, and no more may be at a time",
                reason="too_many_edits",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.taken_count += 1
        try:
            yield
        finally:
            self.taken_count -= 1
