"""How many images that are to be changed may be held at a time. Each is kept, decoded, until its request is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trioserve.contracts.errors import Overloaded

__all__ = ["EditPlaces"]

EDITS_MAX = 32  # with their masks, of the largest size, less than a gigabyte
RETRY_SECONDS = 5.0


class EditPlaces:
    """One tenant holds three quarters of the places at most, so that there are some for the others. Callers that cannot
    be told apart, whose tenant has no name, may hold all."""

    def __init__(self, edits_max: int = EDITS_MAX) -> None:
        self._taken: Counter[str] = Counter()  # by tenant
        self._edits_max = edits_max
        self._own_max = edits_max - edits_max // 4

    @property
    def taken_count(self) -> int:
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises Overloaded when all are taken, or the tenant's."""
        own_max = self._own_max if tenant else self._edits_max
        for count, count_max in ((self.taken_count, self._edits_max), (self._taken[tenant], own_max)):
            if count >= count_max:
                raise Overloaded(
                    f"{count} images are being changed already, and no more may be at a time: try again in "
                    f"{RETRY_SECONDS:.0f} s",
                    reason="too_many_edits",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # without tenants that have none
