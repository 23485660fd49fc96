"""Parts that the feeds of a live page share: who watches, and names of tenants that do not reveal the API key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchers", "tenant_name"]


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


CHARACTERS_MAX = 40


def tenant_name(owner: str | None, tenant: str) -> str | None:
    """Return the name of a tenant for display.

    Args:
        owner: Owner of the request. None if clients are not distinguished.
        tenant: Tenant in the queue. Begins with the owner if there is one.

    Returns:
        A hash of the owner, followed by the tenant's own part. None if there is neither an owner nor a tenant's part.
    """
    if owner is None:
        return tenant[:CHARACTERS_MAX] or None
    key = "key-" + hashlib.blake2b(owner.encode(), digest_size=3).hexdigest()
    named = tenant.removeprefix(owner).removeprefix("/")
    return f"{key}/{named[:CHARACTERS_MAX]}" if named else key
