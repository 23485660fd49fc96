"""The bounds of the live page, each with its unit and its reason."""

from __future__ import annotations

import msgspec

__all__ = ["PageSettings"]


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """is_shown: whether there is a page at all. history_seconds: between two points of the history; 0: none is kept.
    readers_max: pages that are open at a time, and readers_of_one_max, of one API key: each costs its own events.
    pauses_per_cost: how many times as long as the making of an event the pause behind it is, at least, so that all
    readers together take at most half a percent of the event loop's time."""

    is_shown: bool = True
    history_seconds: float = 5.0
    readers_max: int = 16
    readers_of_one_max: int = 4
    pauses_per_cost: float = 200.0
