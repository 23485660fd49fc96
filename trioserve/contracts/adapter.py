"""A LoRA adapter as requests and steps name it, and the salt of what is computed with it."""

from __future__ import annotations

from typing import NewType, Protocol

import msgspec

__all__ = ["AdapterContent", "AdapterId", "AdapterRef", "adapter_salt"]

AdapterId = NewType("AdapterId", int)
"""One loading of an adapter. Counts from 1 and is never used twice while the engine lives."""

_ADAPTER = "adapter:"
_NONE = "none:"  # no digest, which has hexadecimal digits alone


class AdapterRef(msgspec.Struct, frozen=True):
    """digest: names the content, hexadecimal: the same wherever the same adapter is loaded, whatever it is called."""

    id: AdapterId
    digest: str


class AdapterContent(Protocol):
    """An adapter that was read, in host memory."""

    @property
    def digest(self) -> str: ...
    @property
    def rank_max(self) -> int: ...
    @property
    def byte_count(self) -> int: ...


def adapter_salt(salt: str | None, digest: str | None) -> str | None:
    """The salt of blocks that are computed with an adapter, or without one (None). No two pairs give the same, whatever
    salts callers choose; without an adapter nearly every salt stays as it is."""
    if digest is None:
        return f"{_ADAPTER}{_NONE}{salt}" if salt is not None and salt.startswith(_ADAPTER) else salt
    return f"{_ADAPTER}{digest}" if salt is None else f"{_ADAPTER}{digest}={salt}"
