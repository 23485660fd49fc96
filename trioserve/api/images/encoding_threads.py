"""Threads that encode generated images as files. Encoding an image takes up to a second.

Images that clients send are decoded in processes: see ImageDecoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trioserve.trio_tools.fair_slots import FairSlots

__all__ = ["EncodingThreads"]

T = TypeVar("T")

THREADS_MAX = 2  # the other cores are needed to compute images


class EncodingThreads:
    """Threads that encode images. Tenants take turns.

    A cancelled caller leaves at once. Its thread keeps its place until the function returns.

    Args:
        threads_max: Threads at a time.
    """

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._places = FairSlots(threads_max, what="images")

    async def run(self, function: Callable[[], T], *, tenant: str) -> T:
        """Call a function in a thread.

        Args:
            function: Function that uses only its own values, no shared state.
            tenant: Tenant of the request.

        Raises:
            Overloaded: Too many images of this tenant wait.
        """
        return await self._places.call(function, key=tenant)
