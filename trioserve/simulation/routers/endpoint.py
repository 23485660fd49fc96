"""A simulated endpoint of several routers: its seats, its queue, and its reports."""

from __future__ import annotations

import math
from collections import OrderedDict

from trioserve.contracts.endpoint import EndpointId, EndpointLoad

__all__ = ["SimulatedEndpoint"]


class SimulatedEndpoint:
    """An endpoint. Requests are known by their numbers.

    Args:
        id: the endpoint's id.
        seats: how many requests can run.

    Attributes:
        running: requests with a seat.
        waiting: the other requests, in order of arrival.
        most: the most requests that were here at the same time.
        heard_at: when each router last asked for a report.
        reported_at: when the endpoint last reported its load.
        reports_at: when it reports its load next.
    """

    def __init__(self, id: EndpointId, seats: int) -> None:
        self.id = id
        self.running: set[int] = set()
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.most = 0
        self.heard_at: dict[str, float] = {}
        self.reported_at = -math.inf
        self.reports_at = math.inf
        self._seats = seats

    @property
    def count(self) -> int:
        return len(self.running) + len(self.waiting)

    def come(self, number: int) -> bool:
        """Add a request.

        Args:
            number: the request.

        Returns:
            True if it runs at once.
        """
        if len(self.running) < self._seats:
            self.running.add(number)
        else:
            self.waiting[number] = None
        self.most = max(self.most, self.count)
        return number in self.running

    def go(self, number: int) -> int | None:
        """Remove a request that was served, or whose router or client is gone. It may not have arrived yet.

        Args:
            number: the request.

        Returns:
            The request that gets its seat, if any.
        """
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
        """Seconds since each router last asked.

        Args:
            now: the current time.
        """
        return {name: now - heard_at for name, heard_at in self.heard_at.items()}
