"""The bounds of the live page, each with its unit and its reason."""

from __future__ import annotations

import msgspec

__all__ = ["PageSettings"]


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """is_shown: whether there is a page at all. history_seconds: between two points of the history; 0: none is kept.
    readers_max: pages that are open at a time, and readers_of_one_max, of one API key: each costs its own events."""

    is_shown: bool = True
    history_seconds: float = 5.0
    readers_max: int = 16
    readers_of_one_max: int = 4
