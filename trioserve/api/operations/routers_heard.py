"""Which routers ask this server for its load, and when each did last: so that routers which share its limit know what
it knows of the others, also when they cannot see each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

__all__ = ["ROUTER_HEADER", "RoutersHeard"]

ROUTER_HEADER = "x-trioserve-router"
"""Of a question: the name of the router that asks."""
ROUTERS_MAX = 64  # the one that was silent for longest is forgotten
NAME_CHARACTERS_MAX = 128
FORGOTTEN_SECONDS = 60.0


class RoutersHeard:
    """clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_at: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str) -> None:
        """It asks now. A name that is too long is none."""
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            return
        self._heard_at[name] = self._clock()
        self._heard_at.move_to_end(name)
        if len(self._heard_at) > ROUTERS_MAX:
            self._heard_at.popitem(last=False)

    def told(self) -> dict[str, float]:
        """For each of them, how many seconds ago."""
        now = self._clock()
        while self._heard_at and now - next(iter(self._heard_at.values())) > FORGOTTEN_SECONDS:
            self._heard_at.popitem(last=False)
        return {name: round(now - moment, 3) for name, moment in self._heard_at.items()}
