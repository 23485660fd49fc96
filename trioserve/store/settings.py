"""Limits of the store: how much data it stores, and for how long."""

from __future__ import annotations

import msgspec

__all__ = ["StoreSettings"]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the store.

    Attributes:
        bytes_max: highest number of bytes of all objects together, including rows and blobs.
        objects_max: highest number of objects of all kinds together. A row and its index entries count as at least 256
            bytes.
        seconds_max: lifetime in seconds of an object that is written without one.
    """

    # By default, the store is in memory. So the limit must leave memory for the model on a small machine.
    bytes_max: int = 256 * 2**20
    objects_max: int = 100_000
    seconds_max: float = 30 * 86_400.0  # OpenAI also keeps responses for 30 days.
