"""Short names of tenants for people, which do not reveal the API key."""

from __future__ import annotations

import hashlib

__all__ = ["tenant_name"]

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
