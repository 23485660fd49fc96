"""Bounds of the live page, each with its unit and its reason."""

from __future__ import annotations

import msgspec

__all__ = ["PageSettings"]


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the live page.

    Attributes:
        is_shown: False: there is no page.
        history_seconds: time between two points of the history. 0: no history.
        readers_max: pages that may be open at a time, since each costs events.
        readers_of_one_max: pages of one API key that may be open at a time.
        pauses_per_cost: shortest pause after an event, as a multiple of the CPU time that the event cost. With 200, all
            readers together use at most half a percent of the event loop's time.
    """

    is_shown: bool = True
    history_seconds: float = 5.0
    readers_max: int = 16
    readers_of_one_max: int = 4
    pauses_per_cost: float = 200.0
