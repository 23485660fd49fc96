"""How much the store keeps, and for how long. Each bound has its reason."""

from __future__ import annotations

import msgspec

__all__ = ["StoreSettings"]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """bytes_max: of all objects together, each with its row. objects_max: of all kinds together; a row and its index
    entries take a quarter of a kilobyte at least, whatever is in it. seconds_max: the life of an object whose keeper
    gives it no other."""

    bytes_max: int = 256 * 2**20  # in memory by default, so it must leave room for the model on a small machine
    objects_max: int = 100_000
    seconds_max: float = 30 * 86_400.0  # as long as OpenAI keeps responses
