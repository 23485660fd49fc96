"""Level 1 of sleep for an engine without weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

__all__ = ["FakeCacheRelease"]

PartsT = TypeVar("PartsT")


class FakeCacheRelease(Generic[PartsT]):
    """Frees nothing at sleep, since the engine has no weights.

    Args:
        make_again: makes the parts of the engine when it wakes up.
    """

    def __init__(self, make_again: Callable[[], Awaitable[PartsT]]) -> None:
        self._make_again = make_again

    async def release_cache(self) -> None:
        await trio.lowlevel.checkpoint()

    async def rebuild_parts(self) -> PartsT:
        return await self._make_again()
