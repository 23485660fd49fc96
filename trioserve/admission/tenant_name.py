"""Whose a request is, for people: short, and it tells nothing of the key that stands behind it."""

from __future__ import annotations

import hashlib

__all__ = ["tenant_name"]

CHARACTERS_MAX = 40


def tenant_name(owner: str | None, tenant: str) -> str | None:
    """tenant: with whom the request shares its turn; it begins with the owner, if there is one."""
    if owner is None:
        return tenant[:CHARACTERS_MAX] or None
    key = "key-" + hashlib.blake2b(owner.encode(), digest_size=3).hexdigest()
    named = tenant.removeprefix(owner).removeprefix("/")
    return f"{key}/{named[:CHARACTERS_MAX]}" if named else key
