"""References to LoRA adapters in requests and steps, and the salt of blocks that are computed with an adapter."""

from __future__ import annotations

from typing import NewType, Protocol

import msgspec

__all__ = ["AdapterContent", "AdapterId", "AdapterRef", "adapter_salt"]

AdapterId = NewType("AdapterId", int)
"""Number of one load of an adapter. Counts from 1. Loading the same adapter again gives a new number."""

_ADAPTER = "adapter:"
_NONE = "none:"  # No digest equals this value, because a digest consists of hexadecimal digits.


class AdapterRef(msgspec.Struct, frozen=True):
    """A loaded adapter.

    Attributes:
        id: Number of this load of the adapter, unique in the engine.
        digest: Hash of the adapter's content, in hexadecimal. Equal content has an equal digest on every machine, under
            any name.
    """

    id: AdapterId
    digest: str


class AdapterContent(Protocol):
    """An adapter that was read into host memory."""

    @property
    def digest(self) -> str: ...
    @property
    def rank_max(self) -> int: ...
    @property
    def byte_count(self) -> int: ...


def adapter_salt(salt: str | None, digest: str | None) -> str | None:
    """Return the salt of blocks that are computed with an adapter, or without an adapter.

    Different pairs of arguments give different salts, so callers cannot choose a salt that collides.

    Args:
        salt: Salt that the caller chose. None if there is none.
        digest: Digest of the adapter. None without an adapter: the salt is then returned unchanged, unless it looks
            like the salt of an adapter.
    """
    if digest is None:
        return f"{_ADAPTER}{_NONE}{salt}" if salt is not None and salt.startswith(_ADAPTER) else salt
    return f"{_ADAPTER}{digest}" if salt is None else f"{_ADAPTER}{digest}={salt}"
