"""Helpers for live status pages: a counter of watching clients, and names of tenants that do not reveal the API key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchers", "tenant_name"]


class Watchers:
    """Counts the clients that watch a live page. The counter is true while at least one client watches.

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
        """Count the caller as a watching client while the scope is open."""
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
        tenant: Tenant in the queue. It begins with the owner if there is an owner.

    Returns:
        A hash of the owner, followed by the name that the owner gave the tenant. None if there is neither of them.
    """
    if owner is None:
        return tenant[:CHARACTERS_MAX] or None
    key = "key-" + hashlib.blake2b(owner.encode(), digest_size=3).hexdigest()
    named = tenant.removeprefix(owner).removeprefix("/")
    return f"{key}/{named[:CHARACTERS_MAX]}" if named else key
