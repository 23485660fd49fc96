"""Routers that ask this server for its load.

Routers that share the server's limits learn about each other from the server, even if the routers cannot reach each
other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["ROUTER_HEADER", "RoutersHeard"]

ROUTER_HEADER = "x-trioserve-router"
"""Request header with the name of the router."""
ROUTERS_MAX = 64  # If there are more routers, the router that was silent the longest is forgotten.
NAME_CHARACTERS_MAX = 128
FORGOTTEN_SECONDS = 60.0


class RoutersHeard:
    """Remembers when each router last asked.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_at: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str) -> None:
        """Remember that a router asks now.

        Args:
            name: name of the router. An empty or too long name is ignored.
        """
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            return
        self._heard_at[name] = self._clock()
        self._heard_at.move_to_end(name)
        if len(self._heard_at) > ROUTERS_MAX:
            self._heard_at.popitem(last=False)

    def seconds_since(self) -> dict[str, float]:
        """Return the routers that have asked recently, each with the seconds since then."""
        now = self._clock()
        while self._heard_at and now - next(iter(self._heard_at.values())) > FORGOTTEN_SECONDS:
            self._heard_at.popitem(last=False)
        return {name: round(now - heard_at, 3) for name, heard_at in self._heard_at.items()}
