"""Texts and images that are worked on in the event loop: real threads take no virtual time, and end in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from trioserve.admission.text_threads import TextThreads

__all__ = ["InlineTexts"]

T = TypeVar("T")


class InlineTexts(TextThreads):
    async def run(self, function: Callable[[], T], *, size: int) -> T:
        """As TextThreads does, after every other task has had its turn. size: counts for nothing."""
        await trio.lowlevel.checkpoint()
        return function()
