"""An endpoint before which several routers stand: its seats, who waits inside it, and what it tells."""

from __future__ import annotations

import math
from collections import OrderedDict

from trioserve.contracts.endpoint import EndpointId, EndpointLoad

__all__ = ["SimulatedEndpoint"]


class SimulatedEndpoint:
    """Requests by their numbers. running: those with a seat. waiting: the others, in the order in which they came.
    heard_at: when each router has last asked how it is. told_at, tells_at: when it has last told its load,
    and does so next."""

    def __init__(self, id: EndpointId, seats: int) -> None:
        self.id = id
        self.running: set[int] = set()
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.most = 0
        self.heard_at: dict[str, float] = {}
        self.told_at = -math.inf
        self.tells_at = math.inf
        self._seats = seats

    @property
    def count(self) -> int:
        return len(self.running) + len(self.waiting)

    def come(self, number: int) -> bool:
        """Whether it runs at once."""
        if len(self.running) < self._seats:
            self.running.add(number)
        else:
            self.waiting[number] = None
        self.most = max(self.most, self.count)
        return number in self.running

    def go(self, number: int) -> int | None:
        """It is served, or its router or client is gone; perhaps it has not come yet. Returns who runs in its place."""
        self.waiting.pop(number, None)
        if number not in self.running:
            return None
        self.running.discard(number)
        if not self.waiting:
            return None
        following = self.waiting.popitem(last=False)[0]
        self.running.add(following)
        return following

    def load(self) -> EndpointLoad:
        return EndpointLoad(running=len(self.running), waiting=len(self.waiting), max_num_seqs=self._seats)

    def routers_heard(self, now: float) -> dict[str, float]:
        """How many seconds ago."""
        return {name: now - heard_at for name, heard_at in self.heard_at.items()}
