"""Limit for the image edits that run at a time. Each decoded image stays in memory until its request ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trioserve.contracts.errors import Overloaded

__all__ = ["EditSlots"]

EDITS_MAX = 32  # less than a gigabyte, with masks and images of the largest size
RETRY_SECONDS = 5.0


class EditSlots:
    """Counts the image edits that run at a time.

    A named tenant gets at most three quarters of the places, so that some are left for other tenants. Callers without a
    tenant name cannot be distinguished, so together they may take all places.

    Args:
        edits_max: Number of places.
    """

    def __init__(self, edits_max: int = EDITS_MAX) -> None:
        self._taken: Counter[str] = Counter()  # by tenant
        self._edits_max = edits_max
        self._own_max = edits_max - edits_max // 4

    @property
    def taken_count(self) -> int:
        return self._taken.total()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Take a place until the context is left.

        Args:
            tenant: Tenant of the request. "" if it has no name.

        Raises:
            Overloaded: All places, or the tenant's places, are taken.
        """
        own_max = self._own_max if tenant else self._edits_max
        for count, count_max in ((self.taken_count, self._edits_max), (self._taken[tenant], own_max)):
            if count >= count_max:
                raise Overloaded(
                    f"{count} image edits run already (allowed: {count_max}): try again in {RETRY_SECONDS:.0f} s",
                    reason="too_many_edits",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # removes tenants whose count is zero
