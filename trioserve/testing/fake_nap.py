"""Level 1 of sleep for an engine without weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

__all__ = ["FakeNap"]

PartsT = TypeVar("PartsT")


class FakeNap(Generic[PartsT]):
    """Frees nothing at sleep, since the engine has no weights.

    Args:
        make_anew: makes the parts of the engine when it wakes up.
    """

    def __init__(self, make_anew: Callable[[], Awaitable[PartsT]]) -> None:
        self._make_anew = make_anew

    async def release_cache(self) -> None:
        await trio.lowlevel.checkpoint()

    async def rebuild_parts(self) -> PartsT:
        return await self._make_anew()
