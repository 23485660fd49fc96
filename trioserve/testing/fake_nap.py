"""What an engine without weights gives back at level 1 of sleep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

__all__ = ["FakeNap"]

PartsT = TypeVar("PartsT")


class FakeNap(Generic[PartsT]):
    """Gives back what there is, which is nothing."""

    def __init__(self, make_anew: Callable[[], Awaitable[PartsT]]) -> None:
        self._make_anew = make_anew

    async def let_go(self) -> None:
        await trio.lowlevel.checkpoint()

    async def make_anew(self) -> PartsT:
        return await self._make_anew()
