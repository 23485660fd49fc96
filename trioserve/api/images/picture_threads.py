"""Where pictures that a model has made become files: in threads, a few at a time. A picture takes up to a second.

What clients send is decoded in processes: see ImageDecoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trioserve.trio_tools.fair_places import FairPlaces

__all__ = ["PictureThreads"]

T = TypeVar("T")

THREADS_MAX = 2  # at a time: what computes pictures needs the other cores


class PictureThreads:
    """Tenants take turns. A caller that is cancelled leaves at once, and its thread keeps its place until it ends."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self._places = FairPlaces(threads_max, what="images")

    async def run(self, function: Callable[[], T], *, tenant: str) -> T:
        """Call a function of values.

        Raises:
            Overloaded: too many images of this tenant wait.
        """
        return await self._places.call(function, key=tenant)
